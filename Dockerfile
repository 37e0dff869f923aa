# For the CPU:         docker build -t dprlhf .
# For NVIDIA GPUs:     docker build -t dprlhf --build-arg TORCH=cu130 .
# A run:               docker run --gpus all -v "$PWD/runs:/home/dprlhf/app/runs" dprlhf \
#                        train recipes/imdb_gpt2.yaml
# Several processes:   docker run --gpus all --shm-size 8g --entrypoint accelerate dprlhf launch \
#                        --config_file recipes/accelerate/eight_gpus.yaml -m dprlhf train RECIPE
FROM python:3.11-slim
# Which of PyTorch's package indexes torch comes from: cpu, or a CUDA version. Its CUDA packages
# bring CUDA's libraries along, so the image needs no other base; the host brings the driver.
ARG TORCH=cpu
RUN useradd --create-home dprlhf && install -d -o dprlhf -g dprlhf /home/dprlhf/app/runs
USER dprlhf
WORKDIR /home/dprlhf/app
ENV VIRTUAL_ENV=/home/dprlhf/venv PATH=/home/dprlhf/venv/bin:$PATH OMP_WAIT_POLICY=PASSIVE
RUN python -m venv $VIRTUAL_ENV
COPY --chown=dprlhf requirements.lock ./
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/$TORCH" \
    "$(grep '^torch==' requirements.lock)"
COPY --chown=dprlhf pyproject.toml README.md LICENSE ./
COPY --chown=dprlhf src src
# Everything else at its locked version; torch is there already, and satisfies its pin.
RUN pip install --no-cache-dir -c requirements.lock ".[book,demo,report]" && pip check
COPY --chown=dprlhf recipes recipes
ENTRYPOINT ["dprlhf"]
CMD ["--help"]
