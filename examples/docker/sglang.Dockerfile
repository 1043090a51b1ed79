# moeopt in SGLang's image, whose torch, Triton and kernel stay as they are. From the root of the repository:
#
#   docker build -f examples/docker/sglang.Dockerfile -t moeopt-sglang .
#   docker run --rm --gpus '"device=0"' -v /models:/models:ro -v $PWD/data:/data moeopt-sglang \
#       tune --model /models/MODEL --tp 4 --storage /data/moeopt.db --export sglang:/data/moe-configs
#
# Name the image that serves: --build-arg IMAGE=...
ARG IMAGE=lmsysorg/sglang:latest
FROM ${IMAGE}

ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
COPY . /opt/moeopt

# Either all pins hold, or nothing is installed and the build ends here.
RUN python3 -m pip list --format=freeze | grep -E '^(torch|triton|numpy|sglang|vllm)==' > /opt/pins.txt \
 && python3 -m pip install -c /opt/pins.txt /opt/moeopt \
 && python3 -m pip list --format=freeze > /opt/after.txt \
 && ! grep -vxFf /opt/after.txt /opt/pins.txt

WORKDIR /data
ENTRYPOINT ["moeopt"]
