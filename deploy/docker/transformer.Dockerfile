# A worker of the engine `transformer`: vLLM.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG DEVICE=gpu
ENV FOREBAY_CACHE=/opt/forebay FOREBAY_CONFIG=/etc/forebay.toml PYTHONUNBUFFERED=1

# Triton's and vLLM's kernels are compiled when they are first used.
# The newest of the base's distribution, for its security updates:
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir . \
    && UV_NO_CACHE=1 /opt/venv/bin/forebay engines install transformer "--${DEVICE}" \
    && useradd --create-home --uid 10001 forebay

ENV PATH=/opt/forebay/engines/transformer-${DEVICE}/bin:/opt/venv/bin:$PATH
USER 10001:10001
WORKDIR /home/forebay
ENTRYPOINT ["python", "-m", "deploy.cli", "work"]
