# The dashboard:  docker build -t simplan . && docker run --rm -p 127.0.0.1:8501:8501 simplan
# A command:      docker run --rm -v "$PWD:/work:ro" simplan predict /work/plan.yaml
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY simplan simplan
COPY executor executor
COPY app app
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir "$(echo /wheel/simplan-*.whl)[app]"
RUN useradd --create-home --uid 1000 simplan
USER simplan
WORKDIR /home/simplan
# Machine code of the simulators is a part of the image, so that no first search waits for the compiler.
ENV NUMBA_CACHE_DIR=/home/simplan/.cache/numba
RUN simplan search llama3-8b --gpus 16 --global-batch-size 64 --jobs 1 > /dev/null
EXPOSE 8501
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8501/_stcore/health', timeout=5)"]
ENTRYPOINT ["simplan"]
# All addresses of the container; those of the host are chosen by -p. Pages cannot start runs there.
CMD ["dashboard", "--host", "0.0.0.0", "--no-browser"]
