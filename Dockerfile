# A GPU image: docker build -t dprlhf . && docker run --gpus all dprlhf train recipes/imdb_gpt2.yaml
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-pip \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home dprlhf
USER dprlhf
WORKDIR /home/dprlhf/app
ENV VIRTUAL_ENV=/home/dprlhf/venv PATH=/home/dprlhf/venv/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV
COPY --chown=dprlhf requirements.lock pyproject.toml README.md ./
COPY --chown=dprlhf src src
# The lock is a constraint here: torch's CUDA libraries, which it does not list, come along.
RUN pip install --no-cache-dir -c requirements.lock .
COPY --chown=dprlhf recipes recipes
ENTRYPOINT ["dprlhf"]
CMD ["--help"]
