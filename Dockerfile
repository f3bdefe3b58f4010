# The archon command in a container.
#   docker build -t archon .                                                   # PyTorch with CUDA
#   docker build -t archon --build-arg TORCH_INDEX=<index of CPU wheels> .     # PyTorch for CPUs
#   docker run --rm --gpus all --shm-size=8g -v "$PWD":/work archon doctor     # without a GPU: leave out --gpus
FROM python:3.12-slim

# The C compiler builds the CPU kernels on their first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*

# PyTorch first: it is large, and changes less often than archon.
ARG TORCH_INDEX=""
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch

ARG EXTRAS=rl,vision,plots
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[${EXTRAS}]"

RUN useradd --create-home archon && mkdir /work && chown archon /work
USER archon
WORKDIR /work
ENTRYPOINT ["archon"]
CMD ["doctor"]
