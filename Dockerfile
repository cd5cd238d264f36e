# Lockstep with its environment: README's two commands, and the image of a Kubernetes Job.
#
#   docker build -t lockstep .                                  CPUs
#   docker build -t lockstep --build-arg CUDA=13 .              NVIDIA GPUs; 12 for older drivers
#   docker run --name run lockstep                              make repro; results in /lockstep
#   docker build -t lockstep-test --target test . && docker run --rm lockstep-test     make test
#
# A clone is the context, with its .git: DVC and --version ask it. Docs: docs/how-to/scale.md.
FROM python:3.12-slim-bookworm AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 lockstep \
    && install -d -o 1000 /lockstep
USER 1000
WORKDIR /lockstep
COPY --chown=1000 . .
# An empty CUDA is no GPU. NVIDIA's libraries come with the packages, the driver from the host.
ARG CUDA=
ENV PATH=/lockstep/.venv${CUDA:+-gpu}/bin:$PATH \
    GPU=${CUDA:+1} \
    PIP_NO_CACHE_DIR=1
ENV CUDA=${CUDA:-13}
RUN make environment

FROM base AS test
RUN make environment-test
CMD ["make", "test"]

FROM base
CMD ["make", "repro"]
