#!/bin/bash
# Packages:  onnxruntime-gpu 1.31.1, onnx 1.23.2, numpy 2.4.6 (PyPI)
# Guess:     Without a driver and a GPU, ONNX Runtime's get_device() does not say "GPU", CUDA is not among the available
#            providers, and a session for the CUDA provider only is an error.
# Behaviour: Both say what the wheel was built for. The session runs on the CPU; the warning is on stderr, and no Python
#            warning or exception. So a pod that lost its GPU is slow instead of restarted, and a probe with these two
#            functions is always green. get_ep_devices() tells, the session's get_providers() too, and with
#            session.disable_cpu_ep_fallback the session is refused.
# Seen:
#   get_device:                         GPU
#   get_available_providers:            Tensorrt, CUDA, CPU
#   get_ep_devices:                     CPU
#   a session for CUDA:                 has a result, from CPU
#   with disable_cpu_ep_fallback:       Fail
# Needs python3 with venv, and a machine without NVIDIA's driver. It downloads 300 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-cache-dir onnxruntime-gpu==1.31.1 onnx==1.23.2 numpy==2.4.6

cat >ask.py <<'END'
import warnings

import numpy
import onnxruntime
from onnx import TensorProto, helper

warnings.simplefilter("error")
given, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "ab")
graph = helper.make_graph([helper.make_node("Abs", ["a"], ["b"])], "graph", [given], [result])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def short(names):
    return ", ".join(name.removesuffix("ExecutionProvider") for name in names)


def session(**options):
    settings = onnxruntime.SessionOptions()
    for key, value in options.items():
        settings.add_session_config_entry(f"session.{key}", value)
    return onnxruntime.InferenceSession(model, settings, providers=["CUDAExecutionProvider"])


print("get_device:                        ", onnxruntime.get_device())
print("get_available_providers:           ", short(onnxruntime.get_available_providers()))
print("get_ep_devices:                    ", short(device.ep_name for device in onnxruntime.get_ep_devices()))
made = session()
assert made.run(None, {"a": numpy.array([-1], dtype=numpy.float32)})[0][0] == 1
print("a session for CUDA:                 has a result, from", short(made.get_providers()))
try:
    session(disable_cpu_ep_fallback="1")
except Exception as error:
    print("with disable_cpu_ep_fallback:      ", type(error).__name__)
END
venv/bin/python ask.py 2>log | tee seen || cat log
diff seen - <<'END'
get_device:                         GPU
get_available_providers:            Tensorrt, CUDA, CPU
get_ep_devices:                     CPU
a session for CUDA:                 has a result, from CPU
with disable_cpu_ep_fallback:       Fail
END
