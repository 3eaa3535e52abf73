# A node or a coordinator. CPU by default; `--build-arg DEVICE=cuda` for NVIDIA GPUs.
#   docker build -t dilocox .
#   docker run -v dilocox:/data -p 7410:7410 -p 7411:7411 -p 127.0.0.1:7412:7412 dilocox \
#       node --join LINK --host YOUR.PUBLIC.ADDRESS --api 0.0.0.0:7412
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG DEVICE=cpu
# Where pip finds torch's CPU build.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

RUN useradd --create-home --uid 1000 dilocox \
    && mkdir /data /run/dilocox \
    && chown dilocox /data /run/dilocox \
    && python3 -m venv /opt/dilocox
ENV PATH=/opt/dilocox/bin:$PATH \
    DILOCOX_HOME=/data \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

WORKDIR /src
# The large layer first: it changes only with a package. Every one by its hash (`make lock`).
COPY deploy/${DEVICE}.lock packages.lock
# torch's own tests and C++ headers are of no use here: 200 MB.
RUN pip install --no-cache-dir --extra-index-url "$TORCH_CPU_INDEX" --require-hashes -r packages.lock \
    && cd /opt/dilocox/lib/python3*/site-packages/torch \
    && rm -rf test include && find bin -type f ! -name torch_shm_manager -delete
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY coordinator coordinator
COPY node node
COPY transport transport
COPY views views
COPY cli cli
COPY plugins/etcd plugins/etcd
COPY plugins/tee plugins/tee
# A C compiler builds the codec's fast path; without one the codec runs its reference. On GPUs torch's compiler needs it, too.
RUN (apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev || echo "no compiler here") \
    && pip install --no-cache-dir --no-deps --no-build-isolation . ./plugins/etcd ./plugins/tee \
    && (test "$DEVICE" != cpu || apt-get purge -qy --auto-remove gcc libc6-dev || true) \
    && rm -rf /src/* /var/lib/apt/lists/*

USER dilocox
WORKDIR /data
VOLUME /data
# gRPC, DHT and HTTP; publish the first two to be reachable, the last on 127.0.0.1 alone.
# 7400 to 7402 of a coordinator, 7410 to 7412 of a node.
EXPOSE 7400 7401 7402 7410 7411 7412
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s \
    CMD ["python3", "-P", "-m", "dilocox.transport.process.health"]
ENTRYPOINT ["dilocox"]
CMD ["--help"]
