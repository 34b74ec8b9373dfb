# A pod: a machine that `nsa-ops pod add` can reach by SSH, with the locked environment ready.
#
#   docker build --build-arg TORCH_BACKEND=cu128 --tag nsa-pod .
#   docker run --gpus all --publish 2222:22 --env PUBLIC_KEY="$(cat ~/.ssh/id_ed25519.pub)" \
#     --volume nsa-workspace:/workspace nsa-pod
#
# The card's driver comes from the host and CUDA from torch's own wheels, so a plain Python base is
# enough. A base with CUDA in it works too, as long as it is Debian or Ubuntu with Python 3.11 to 3.14.
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE}

# What a run needs from the system. gcc and libc6-dev: Triton compiles its launchers on the pod.
# Not pinned: the base image's own snapshot decides, and security fixes must come in.
# hadolint ignore=DL3008
RUN export DEBIAN_FRONTEND=noninteractive \
    && apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates gcc git libc6-dev openssh-server procps rsync tmux \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*_key* \
    && mkdir -p /run/sshd /workspace

# The environment first, from the lock alone: a change of the code does not install it again.
COPY requirements/train.lock requirements/torch.txt /opt/nsa/requirements/
RUN python3 -m venv /opt/nsa/venv \
    && /opt/nsa/venv/bin/pip install --no-cache-dir --require-hashes \
        --requirement /opt/nsa/requirements/train.lock

# No card is visible while an image is built, so the build of torch is named, not detected:
# cu126 for V100, cu128 or newer otherwise, cpu for a pod without a card.
ARG TORCH_BACKEND=cu128
RUN /opt/nsa/venv/bin/uv pip install --no-cache --python /opt/nsa/venv/bin/python \
        --torch-backend "${TORCH_BACKEND}" --requirement /opt/nsa/requirements/torch.txt

COPY docker/sshd.conf /etc/ssh/sshd_config.d/nsa.conf
COPY docker/start-pod.sh /usr/local/bin/start-pod

ENV PATH=/opt/nsa/venv/bin:${PATH} PYTHONUNBUFFERED=1
WORKDIR /workspace
EXPOSE 22
HEALTHCHECK --interval=30s --timeout=5s CMD ["ssh-keyscan", "-T", "4", "127.0.0.1"]
CMD ["start-pod"]
