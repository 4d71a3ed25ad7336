# A worker of the engine `ssm`: mamba_ssm, whose CUDA kernels are built here, which takes nvcc.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

ARG DEVICE=gpu
ENV FOREBAY_CACHE=/opt/forebay FOREBAY_CONFIG=/etc/forebay.toml PYTHONUNBUFFERED=1

# What mamba_ssm is built with; nvcc comes with the base. For DEVICE=cpu, BASE=python:3.12-slim-bookworm will do.
# The newest of the base's distribution, for its security updates:
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir . \
    && UV_NO_CACHE=1 /opt/venv/bin/forebay engines install ssm "--${DEVICE}" \
    && useradd --create-home --uid 10001 forebay

ENV PATH=/opt/forebay/engines/ssm-${DEVICE}/bin:/opt/venv/bin:$PATH
USER 10001:10001
WORKDIR /home/forebay
ENTRYPOINT ["python", "-m", "deploy.cli", "work"]
