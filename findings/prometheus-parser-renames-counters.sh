#!/bin/bash
# Package:   prometheus-client 0.26.0 (PyPI)
# Guess:     prometheus_client's parser gives the metrics of NVIDIA's DCGM exporter the names that the exporter writes and
#            Prometheus stores.
# Behaviour: A counter's samples get "_total" behind their name if they lack it, as most of DCGM's counters do: the
#            text format does not demand it. A program that looks for DCGM_FI_DEV_PCIE_REPLAY_COUNTER, as a query to
#            Prometheus does, finds nothing. A collector that passes the metrics on renames them in Prometheus.
# Seen:
#   GPU_TEMP (gauge):                     DCGM_FI_DEV_GPU_TEMP
#   PCIE_REPLAY_COUNTER (counter):        DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total
#   TOTAL_ENERGY_CONSUMPTION (counter):   DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total
#   passed on: DCGM_FI_DEV_GPU_TEMP DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check prometheus-client==0.26.0

cat >metrics <<'END'
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0"} 30
# HELP DCGM_FI_DEV_PCIE_REPLAY_COUNTER Total number of PCIe retries.
# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER counter
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{gpu="0"} 5
# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Total energy consumption since boot (in mJ).
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"} 7
END
cat >read.py <<'END'
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

with open("metrics", encoding="utf-8") as file:
    text = file.read()


class Passing:
    def collect(self):
        return text_string_to_metric_families(text)


for family in text_string_to_metric_families(text):
    print(f"{family.name.removeprefix('DCGM_FI_DEV_')} ({family.type}):".ljust(37), family.samples[0].name)
registry = CollectorRegistry()
registry.register(Passing())
lines = generate_latest(registry).decode().splitlines()
print("passed on:", *(line.split("{")[0] for line in lines if not line.startswith("#")))
END
venv/bin/python read.py | tee seen
diff seen - <<'END'
GPU_TEMP (gauge):                     DCGM_FI_DEV_GPU_TEMP
PCIE_REPLAY_COUNTER (counter):        DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total
TOTAL_ENERGY_CONSUMPTION (counter):   DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total
passed on: DCGM_FI_DEV_GPU_TEMP DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total
END
