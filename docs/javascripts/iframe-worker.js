// Browsers start no workers for pages that are opened as files. There, the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          frame.contentDocument.body.append(script);
        });
      scope.importScripts = (...sources) => Promise.all(sources.map(load));
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope = scope;
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
