# A node or a coordinator. CPU by default; `--build-arg DEVICE=cuda` for NVIDIA GPUs.
#   docker build -t dilocox .
#   docker run -v dilocox:/data dilocox node --join LINK
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG DEVICE=cpu
# Where pip finds torch's CPU build; ignored when the package index already has it.
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
COPY constraints.txt .
# The largest layer first: it changes only when torch does.
RUN version=$(grep '^torch==' constraints.txt) \
    && if [ "$DEVICE" = cpu ]; then \
         pip install --no-cache-dir --extra-index-url "$TORCH_CPU_INDEX" "$version+cpu" || pip install --no-cache-dir "$version"; \
       else pip install --no-cache-dir "$version"; fi
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY coordinator coordinator
COPY node node
COPY transport transport
COPY views views
COPY cli cli
RUN pip install --no-cache-dir -c constraints.txt . && rm -rf /src/*

USER dilocox
WORKDIR /data
VOLUME /data
# gRPC, DHT and HTTP; publish the first two to be reachable.
EXPOSE 7400 7401 7402
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s \
    CMD ["python3", "-P", "-m", "dilocox.transport.health"]
ENTRYPOINT ["dilocox"]
CMD ["--help"]
