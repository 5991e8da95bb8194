#!/bin/bash
# Package:   @kubernetes/client-node 1.4.0 (npm)
# Guess:     An object that JavaScript's official client is given with the API's own names, as from JSON.parse of a
#            manifest, is sent as it is.
# Behaviour: The client writes only what its classes know, and these have other names for some fields: _int for a
#            device's attribute "int", _default for "default" of a capacity's requestPolicy and of a LimitRange, _from
#            for "from" of a NetworkPolicy. A field with the API's name is left out without a word. So a ResourceSlice
#            has an attribute without a value, where text and truth values get through, and a default is none. Its
#            loadYaml renames the fields, JSON.parse does not. Version 2.0.1 has the same names.
# Seen (what the server gets of an index, a name and a requestPolicy; a LimitRange):
#   JSON.parse: {"index":{},"name":{"string":"H200"}} {"validValues":["1Gi","2Gi"]}
#   loadYaml:   {"index":{"int":3},"name":{"string":"H200"}} {"default":"1Gi","validValues":["1Gi","2Gi"]}
#   _int:       {"index":{"int":3},"name":{"string":"H200"}} {"default":"1Gi","validValues":["1Gi","2Gi"]}
#   LimitRange, JSON.parse: {"max":{"cpu":"2"},"type":"Container"}
# Needs node 20 or later with npm.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

npm install --silent --no-audit --no-fund --cache "$directory/cache" @kubernetes/client-node@1.4.0 >/dev/null
cat >ask.mjs <<'END'
import http from 'node:http';
import { CoreV1Api, KubeConfig, ResourceV1Api, loadYaml } from '@kubernetes/client-node';

// It answers with what it gets.
let body;
const server = http.createServer(async (request, response) => {
  body = '';
  for await (const part of request) body += part;
  response.setHeader('content-type', 'application/json');
  response.end(body);
});
await new Promise((done) => server.listen(0, '127.0.0.1', done));
const config = new KubeConfig();
config.loadFromOptions({
  clusters: [{ name: 'one', server: `http://127.0.0.1:${server.address().port}`, skipTLSVerify: true }],
  users: [{ name: 'one' }],
  contexts: [{ name: 'one', cluster: 'one', user: 'one' }],
  currentContext: 'one',
});

const manifest = JSON.stringify({
  apiVersion: 'resource.k8s.io/v1', kind: 'ResourceSlice', metadata: { name: 'one' },
  spec: {
    driver: 'gpu.nvidia.com', nodeName: 'n', pool: { name: 'n', generation: 1, resourceSliceCount: 1 },
    devices: [{
      name: 'gpu-0', attributes: { index: { int: 3 }, name: { string: 'H200' } },
      capacity: { memory: { value: '80Gi', requestPolicy: { default: '1Gi', validValues: ['1Gi', '2Gi'] } } },
    }],
  },
});
const renamed = JSON.parse(manifest.replace('"int"', '"_int"').replace('"default"', '"_default"'));
const bodies = { 'JSON.parse': JSON.parse(manifest), loadYaml: loadYaml(manifest), _int: renamed };
for (const [name, given] of Object.entries(bodies)) {
  await config.makeApiClient(ResourceV1Api).createResourceSlice({ body: given });
  const [device] = JSON.parse(body).spec.devices;
  const policy = JSON.stringify(device.capacity.memory.requestPolicy);
  console.log(`${`${name}:`.padEnd(11)} ${JSON.stringify(device.attributes)} ${policy}`);
}
const limits = JSON.parse('[{"type": "Container", "default": {"cpu": "1"}, "max": {"cpu": "2"}}]');
const range = { metadata: { name: 'one' }, spec: { limits } };
await config.makeApiClient(CoreV1Api).createNamespacedLimitRange({ namespace: 'one', body: range });
console.log(`LimitRange, JSON.parse: ${JSON.stringify(JSON.parse(body).spec.limits[0])}`);
server.close();
END
node ask.mjs | tee seen
diff seen - <<'END'
JSON.parse: {"index":{},"name":{"string":"H200"}} {"validValues":["1Gi","2Gi"]}
loadYaml:   {"index":{"int":3},"name":{"string":"H200"}} {"default":"1Gi","validValues":["1Gi","2Gi"]}
_int:       {"index":{"int":3},"name":{"string":"H200"}} {"default":"1Gi","validValues":["1Gi","2Gi"]}
LimitRange, JSON.parse: {"max":{"cpu":"2"},"type":"Container"}
END
