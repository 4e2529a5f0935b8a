"use strict";

const find = (id) => document.getElementById(id);
const number = (id) => Number(find(id).value);
let running = null; // The AbortController of the answers that are being generated.

function headers() {
  const token = find("token").value;
  return { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
}

async function call(path, body, signal) {
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers: headers(), signal, body: body && JSON.stringify(body) });
  if (response.status === 401) find("access").hidden = false;
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

// Yields the objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Shows a token with a background that is stronger the less probable the token was.
function token(text, logprob) {
  const span = document.createElement("span");
  const percent = 100 * Math.exp(logprob);
  span.textContent = text;
  span.title = `${percent.toFixed(1)}%`;
  span.style.setProperty("--surprise", Math.min(1, -logprob / 5));
  return span;
}

const generation = (model) => (model.has_chat ? "v1/chat/completions" : "v1/completions");
const input = (model, prompt) => (model.has_chat ? { messages: [{ role: "user", content: prompt }] } : { prompt });

// Both return what is shown below the answer, and its text.
async function stream(model, prompt, article, signal) {
  const shown = article.querySelector(".text");
  const options = { model: model.id, stream: true, temperature: number("temperature"), top_p: number("top_p") };
  if (find("max_tokens").value) options.max_tokens = number("max_tokens");
  const logprobs = model.has_chat ? { logprobs: true, top_logprobs: 1 } : { logprobs: 1 };
  const body = { ...options, ...logprobs, ...input(model, prompt) };
  const begun = performance.now();
  let count = 0, sum = 0, first = 0, text = "";
  for await (const event of events(await call(generation(model), body, signal))) {
    for (const choice of event.choices) {
      const found = choice.logprobs ?? {};
      const logprobs = found.token_logprobs ?? (found.content ?? []).map((each) => each.logprob);
      first ||= performance.now() - begun;
      count += logprobs.length;
      const total = logprobs.reduce((a, b) => a + b, 0);
      sum += total;
      const piece = choice.text ?? choice.delta.content ?? "";
      text += piece;
      if (piece) shown.append(token(piece, total / Math.max(1, logprobs.length)));
    }
  }
  if (!text) shown.textContent = "(no text)";
  const seconds = (performance.now() - begun) / 1000;
  return [`${count} tokens, ${(count / seconds).toFixed(1)} a second, the first after ${first.toFixed(0)} ms; `
    + `log probability ${sum.toFixed(2)}`, text];
}

async function search(model, prompt, article, signal) {
  const body = { model: model.id, n: number("beams"), use_beam_search: true, ...input(model, prompt) };
  const { choices } = await (await call(generation(model), body, signal)).json();
  const list = article.querySelector(".texts");
  const texts = choices.map(({ text, message }) => text ?? message.content);
  list.hidden = false;
  choices.forEach(({ score }, index) => {
    const item = document.createElement("li");
    const shown = document.createElement("small");
    shown.textContent = ` ${score.toFixed(2)}`;
    item.append(texts[index] || "(no text)", shown);
    list.append(item);
  });
  return ["each text with its score", texts[0]];
}

function cell(kind, text, scope) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (scope) Object.assign(made, { scope, textContent: text || "◦" }); // An end token has no text.
  return made;
}

// Shows how much each token of the answer, a row, attends to each token of the input, a column, in percent.
async function showAttention(model, prompt, text, article) {
  const figure = article.querySelector("figure");
  const select = figure.querySelector("select");
  const caption = figure.querySelector("figcaption p");
  figure.hidden = false;
  try {
    const layer = select.value ? { layer: Number(select.value) } : {};
    const body = { model: model.id, target: text, ...layer, ...input(model, prompt) };
    const found = await (await call("v1/attention", body)).json();
    select.replaceChildren(...Array.from({ length: found.layers }, (_, n) => new Option(n + 1, n)));
    select.value = found.layer;
    const head = document.createElement("tr");
    head.append(cell("td", ""), ...found.input_tokens.map((each) => cell("th", each, "col")));
    const largest = Math.max(...found.weights.flat());
    const rows = found.weights.map((weights, index) => {
      const row = document.createElement("tr");
      row.append(cell("th", found.tokens[index], "row"), ...weights.map((weight) => {
        const made = cell("td", weight < 0.005 ? "" : Math.round(100 * weight));
        made.title = `${(100 * weight).toFixed(1)}%`;
        made.style.setProperty("--weight", weight / largest);
        return made;
      }));
      return row;
    });
    figure.querySelector("table").replaceChildren(head, ...rows);
    caption.textContent = "How much each token of the answer attends to each token of the text, in percent";
  } catch (error) {
    caption.textContent = error.message;
  }
}

async function answer(model, prompt, signal) {
  const article = find("answer").content.cloneNode(true).firstElementChild;
  article.querySelector("h2").textContent = model.id;
  find("answers").append(article);
  const numbers = article.querySelector(".numbers");
  numbers.textContent = "…";
  try {
    const [shown, text] = await (number("beams") ? search : stream)(model, prompt, article, signal);
    numbers.textContent = shown;
    const button = article.querySelector("button");
    const show = () => showAttention(model, prompt, text, article);
    button.hidden = !model.has_encoder;
    button.addEventListener("click", show);
    article.querySelector("select").addEventListener("change", show);
  } catch (error) {
    numbers.textContent = signal.aborted ? "cancelled" : error.message;
    numbers.classList.toggle("error", !signal.aborted);
  }
}

async function send(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  find("send").disabled = true;
  find("cancel").disabled = false;
  find("answers").replaceChildren();
  const chosen = [...document.querySelectorAll("#models input:checked")].map((box) => box.model);
  const prompt = find("prompt").value;
  await Promise.all(chosen.map((model) => answer(model, prompt, running.signal)));
  running = null;
  find("send").disabled = false;
  find("cancel").disabled = true;
}

async function showModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    find("access").hidden = true;
    document.querySelectorAll("#models label").forEach((label) => label.remove());
    for (const model of data) {
      const label = document.createElement("label");
      const box = document.createElement("input");
      Object.assign(box, { type: "checkbox", checked: model === data[0], model });
      label.append(box, ` ${model.id}`);
      find("models").append(label);
    }
    find("max_tokens").placeholder = data[0].output_length;
    find("max_tokens").max = Math.max(...data.map((model) => model.output_length));
    find("health").textContent = `ready: inputs up to ${data[0].input_length} tokens`;
  } catch (error) {
    find("health").textContent = error.message;
  }
}

find("request").addEventListener("submit", send);
find("cancel").addEventListener("click", () => running?.abort());
find("token").addEventListener("change", showModels);
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("request").requestSubmit();
});
showModels();
