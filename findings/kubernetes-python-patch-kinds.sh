#!/bin/bash
# Packages:  kubernetes 37.0.2, kubernetes_asyncio 36.1.0, lightkube 1.0.1, lightkube-models 1.37.0.8, kr8s 0.20.15
#            (PyPI), kubectl 1.32.3+ds-2 (Debian 13)
# Guess:     A patch that is a dict means the same in each Python client: a strategic merge patch, as of "kubectl
#            patch", for the objects of Kubernetes itself, and a merge patch for custom ones, which know no other. So a
#            condition and a taint for GPUs are added to those that a node has.
# Behaviour: kr8s sends a merge patch to all: the conditions of the patch replace the node's, its readiness among them,
#            without a word. kubernetes_asyncio sends a dict for a custom object as a JSON patch, which has to be a
#            list, so the API server refuses it, and the same call of the client without asyncio works. A node's
#            taints are replaced by a strategic merge patch as well, with each client.
# Seen (the node has the condition Ready and the taint other; the patches have GpuHealthy and gpu):
#   kubernetes:         node strategic-merge-patch, custom object merge-patch; GpuHealthy Ready; gpu
#   kubernetes_asyncio: node strategic-merge-patch, custom object json-patch; GpuHealthy Ready; gpu
#   lightkube:          node strategic-merge-patch; GpuHealthy Ready; gpu
#   kr8s:               node merge-patch; GpuHealthy; gpu
#   a dict as a JSON patch: cannot unmarshal object into Go value of type jsonpatch.Patch
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download kubectl=1.32.3+ds-2
dpkg -x kubectl_*.deb root
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check kubernetes==37.0.2 kubernetes_asyncio==36.1.0 \
  lightkube==1.0.1 lightkube-models==1.37.0.8 kr8s==0.20.15

cat >ask.py <<'END'
import asyncio
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kr8s
import kubernetes
import kubernetes_asyncio
import lightkube
from lightkube.config.kubeconfig import KubeConfig
from lightkube.resources.core_v1 import Node

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}


def parts(taint, condition):
    taints = [{"key": taint, "effect": "NoSchedule"}]
    return {"spec": {"taints": taints}, "status": {"conditions": [{"type": condition, "status": "True"}]}}


NODE |= parts("other", "Ready")
PATCH = parts("gpu", "GpuHealthy")
CUSTOM = ("nvidia.com", "v1", "clusterpolicies", "n", {"spec": {"a": 1}})
kinds = []


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        body = json.dumps({**NODE, "major": "1", "minor": "34", "gitVersion": "v1.34.0"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PATCH(self):
        kinds.append(self.headers["Content-Type"].removeprefix("application/").removesuffix("+json"))
        self.do_GET()

    def log_message(self, *arguments):
        pass


def ask_kubernetes(url):
    client = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=url))
    kubernetes.client.CoreV1Api(client).patch_node("n", PATCH)
    kubernetes.client.CustomObjectsApi(client).patch_cluster_custom_object(*CUSTOM)


def ask_kubernetes_asyncio(url):
    async def ask():
        client = kubernetes_asyncio.client
        async with client.ApiClient(client.Configuration(host=url)) as api:
            await client.CoreV1Api(api).patch_node("n", PATCH)
            await client.CustomObjectsApi(api).patch_cluster_custom_object(*CUSTOM)

    asyncio.run(ask())


def settings(url):
    one = {"apiVersion": "v1", "kind": "Config", "current-context": "one"}
    one["clusters"] = [{"name": "one", "cluster": {"server": url}}]
    one["users"] = [{"name": "one", "user": {"token": "none"}}]
    return {**one, "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}]}


def ask_lightkube(url):
    lightkube.Client(config=KubeConfig.from_dict(settings(url))).patch(Node, "n", PATCH)


def ask_kr8s(url):
    with open("kubeconfig", "w", encoding="utf-8") as file:
        json.dump(settings(url), file)
    kr8s.objects.Node(NODE, api=kr8s.api(kubeconfig="kubeconfig")).patch(PATCH)


def kubectl(kind, patch):
    argv = ["root/usr/bin/kubectl", "patch", "--local", "--filename=node.json", "--output=json"]
    return subprocess.run([*argv, f"--type={kind}", f"--patch={json.dumps(patch)}"], text=True, capture_output=True)


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
with open("node.json", "w", encoding="utf-8") as file:
    json.dump(NODE, file)
for name, ask in {
    "kubernetes": ask_kubernetes,
    "kubernetes_asyncio": ask_kubernetes_asyncio,
    "lightkube": ask_lightkube,
    "kr8s": ask_kr8s,
}.items():
    kinds.clear()
    ask(f"http://127.0.0.1:{server.server_address[1]}")
    patched = json.loads(kubectl(kinds[0].split("-")[0], PATCH).stdout)
    taints = " ".join(each["key"] for each in patched["spec"]["taints"])
    conditions = " ".join(each["type"] for each in patched["status"]["conditions"])
    custom = f", custom object {kinds[1]}" if len(kinds) > 1 else ""
    print(f"{name + ':':19} node {kinds[0]}{custom}; {conditions}; {taints}")
print("a dict as a JSON patch:", kubectl("json", PATCH).stderr.strip().split("json: ")[-1])
END
HOME=$PWD venv/bin/python ask.py | tee seen
diff seen - <<'END'
kubernetes:         node strategic-merge-patch, custom object merge-patch; GpuHealthy Ready; gpu
kubernetes_asyncio: node strategic-merge-patch, custom object json-patch; GpuHealthy Ready; gpu
lightkube:          node strategic-merge-patch; GpuHealthy Ready; gpu
kr8s:               node merge-patch; GpuHealthy; gpu
a dict as a JSON patch: cannot unmarshal object into Go value of type jsonpatch.Patch
END
