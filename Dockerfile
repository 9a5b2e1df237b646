# weft for GPUs. NOT BUILT AND NOT RUN so far: no GPU and no Docker engine were available. Versions are those tested on
# CPUs; torch 2.13.0 from pip is its CUDA build on Linux x86-64. Please report the outcome in an issue.
#
#   docker build -t weft .
#   openssl rand -hex 32 > key && chmod 644 key
#   docker run --gpus all --shm-size 8g -p 127.0.0.1:8000:8000 \
#       -v "$PWD/key:/run/secrets/weft-key:ro" -v weft:/data weft
#
# With another model than the small one that weft ships, and with another command:
#
#   docker run … -v /models/wan:/model:ro weft serve /model --ranks 8 --dtype bfloat16 \
#       --host 0.0.0.0 --api-key-file /run/secrets/weft-key --data /data
#   docker run --rm --gpus all weft doctor
FROM python:3.11.7-slim-bookworm

# The compiled CPU kernel and Triton's launchers are built at first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# torch first, in its own layer: it is large, and later packages must not install another build.
RUN pip install torch==2.13.0
RUN pip install triton==3.7.1 numpy==2.4.6 safetensors==0.8.0 typer==0.29.0 rich==15.0.0 av==18.1.0 pillow==13.0.0 \
    diffusers==0.42.1 transformers==5.22.2 accelerate==1.15.0 fastapi==0.162.4 starlette==1.10.0 pydantic==2.14.3 \
    uvicorn==0.54.0 python-multipart==0.0.33 sse-starlette==3.7.0 prometheus-client==0.26.0 httpx==0.28.1 hatchling==1.33.0

COPY pyproject.toml README.md LICENSE /src/
COPY weft /src/weft
RUN pip install --no-build-isolation '/src[gpu,models,serve]' && rm -rf /src

RUN useradd --create-home --uid 1000 weft && install -d -o weft -g weft /data
USER weft
WORKDIR /home/weft
VOLUME /data
EXPOSE 8000

HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/live', timeout=4)"]

# Other machines can reach a port of a container, so requests need a key; weft does not start without one.
ENTRYPOINT ["weft"]
CMD ["serve", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/weft-key", "--data", "/data"]
