# The dispatcher, and the rest of the command line: no engine, no torch.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

WORKDIR /src
COPY . .
RUN python3 -m venv /opt/venv && /opt/venv/bin/python -m pip install --no-cache-dir . && useradd --uid 10001 forebay

ENV PATH=/opt/venv/bin:$PATH FOREBAY_CONFIG=/etc/forebay.toml PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/forebay
ENTRYPOINT ["forebay"]
CMD ["dispatch"]
