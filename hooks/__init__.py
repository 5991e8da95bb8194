"""The injection engine: what a container asks for becomes edits of its OCI spec.

The manual
----------
A pipeline of small values; every arrow is a function that can be tested alone::

    spec ──read_request──▶ Request ──judge──▶ Request ─┐
                                                       ├─decide──▶ Grant ─┐
    node ──take_inventory──────────────────▶ Inventory─┘                  ├─make_plan──▶ Plan ─▶ …
    image ─read_layout─────────────────────▶ Layout ──────────────────────┘

    Plan ──apply, verify──▶ spec'
         └─place──▶ files

- :mod:`hooks.requests.glance`: whether a container may ask for anything. It is the only module
  that one without GPU loads.
- :mod:`hooks.requests.request`: what it asks, by the places in which it can
  (:mod:`hooks.requests.sources`) and the names that devices have (:mod:`hooks.requests.naming`).
  Parsing is total: each spec is a request or one typed error.
- :mod:`hooks.requests.policy`: what of a request is allowed to whom asks.
- :mod:`hooks.requests.requirements`: what an image needs of the driver and the GPUs.
- :mod:`hooks.requests.exclusions`: the GPUs that nobody gets.
- :mod:`hooks.edits.capabilities`: the table from driver capability to files, devices and sockets.
- :mod:`hooks.config`: where the node keeps its driver, devices, procfs and sysfs; the policy.
  :mod:`hooks.nvidia_config` reads NVIDIA's own file where ours is not there.
- :mod:`hooks.node.inventory`: what the node has. Made by :mod:`hooks.node.driver` (files),
  :mod:`hooks.node.gpus` (GPUs, MIG devices, nodes) and a child that asks NVML
  (:mod:`hooks.node.nvml`, :mod:`hooks.node.nvml_probe`), all of them through
  :mod:`hooks.node.witness`, which remembers what it looked at; :mod:`hooks.node.cache` keeps the
  result for as long as all of it still looks the same.
- :mod:`hooks.edits.grant`: which of the node's devices the container gets.
- :mod:`hooks.image.layout`: what the image looks like, read through :mod:`hooks.image.rootfs`.
- :mod:`hooks.edits.planning`: the edits as values (:mod:`hooks.edits.plan`).
- :mod:`hooks.edits.features`: what comes beside GPUs; :mod:`hooks.edits.profile` and
  :mod:`hooks.node.parameters`: small files that go with them.
- :mod:`hooks.edits.mutation`: the edits written into the spec; :mod:`hooks.edits.verification`
  checks the result.
- :mod:`hooks.image.placement`: links and the dynamic loader's cache written into the rootfs;
  :mod:`hooks.image.small_files` has other files and directories of links.
- :mod:`hooks.node.modules`, :mod:`hooks.node.nodes`: kernel modules and device nodes that are
  missing.
- :mod:`hooks.node.char_links`: the links of device nodes that systemd wants on the host.
- :mod:`hooks.record`: all of that as JSON, for people and for later execs; :mod:`hooks.story`
  tells it to people.
- :mod:`hooks.cdi`: CDI specs of any vendor, read and applied; NVIDIA's, written.
- :mod:`hooks.engine`: the few functions that a shim calls.

Rules
-----
- Decisions are pure; what touches the system is short and does only that.
- Everything that can be decided is decided before anything is written.
- There are no OCI hooks of ours, and no program of the host runs in a container's view.
- A source of requests and a kind of edit are rows beside others, so
  that further ones are added and not woven in.
"""
