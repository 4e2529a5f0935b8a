# rosetta-t5 on NVIDIA GPUs. jax's wheels contain CUDA's libraries; the base image lets containers use the driver.
#
#   docker build -t rosetta-t5 .                                    # --build-arg TE=1 adds Transformer Engine
#   docker run --gpus all -v /data:/data -v $PWD/runs:/runs rosetta-t5 \
#     rosetta-t5 train --gin_file=gin/examples/small_pile_pretrain.gin --gin.MODEL_DIR="'/runs/small'"
#   docker build --target serving -t rosetta-t5-serving .           # answers requests; see docs/serving.md
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v $PWD/runs:/runs rosetta-t5-serving --model_dir /runs/small
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04 AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The packages have no fixed versions: the base image determines them.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends python3 python3-venv python3-dev make g++ git \
  && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --shell /bin/bash t5 && mkdir /opt/rosetta-t5 && chown t5 /opt/rosetta-t5
USER 10001
WORKDIR /opt/rosetta-t5
ENV PATH=/opt/rosetta-t5/.venv/bin:$PATH PYTHONUNBUFFERED=1

# The dependencies are installed in a stage of their own, before tests, docs and benchmarks are copied.
FROM base AS installed
COPY --chown=t5 Makefile setup.cfg pyproject.toml requirements.lock README.md LICENSE ./
COPY --chown=t5 rosetta_t5 rosetta_t5
COPY --chown=t5 t5x t5x
COPY --chown=t5 gin gin
COPY --chown=t5 scripts_gpu scripts_gpu
COPY --chown=t5 docker docker
RUN make setup
ARG EXTRAS=gpu
# The installed version of jax, because requirements.lock has one for each Python.
RUN jax=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') \
  && if [ -n "$EXTRAS" ]; then .venv/bin/python -m pip install --no-cache-dir "jax[cuda13]==$jax"; fi
ARG TE=0
# Transformer Engine is compiled against CUDA's headers, which is slow, so it is only installed on request.
RUN if [ "$TE" = 1 ]; then \
    .venv/bin/python -m pip install --no-cache-dir --no-build-isolation "transformer-engine[jax]>=2.20"; fi

FROM installed AS tested
COPY --chown=t5 tests tests
COPY --chown=t5 docs docs
COPY --chown=t5 benchmarks benchmarks
RUN make test && touch /tmp/tested

FROM installed AS passed
# The images exist only if the tests have passed.
COPY --from=tested /tmp/tested /tmp/tested

FROM passed AS serving
EXPOSE 8000
HEALTHCHECK --start-period=15m CMD ["python", "-c", "from urllib import request; request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["rosetta-t5", "serve", "--host", "0.0.0.0"]

FROM passed
CMD ["rosetta-t5", "doctor"]
