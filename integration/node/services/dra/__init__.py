"""The agent as a driver of Kubernetes' dynamic resource allocation (DRA).

::

    inventory, health ──▶ devices ──▶ ResourceSlices in the API server
    kubelet ──▶ claims ──▶ checkpoint, a claim's CDI spec ──▶ CDI names

How a claim gets its devices, from the kubelet's call to the container:

1. :mod:`.service` is the only module that is loaded without ``--dra``. The values that other
   services read are in :mod:`integration.node.values.claims`.
2. :mod:`.server` owns the sockets, also those of two instances during an update; :mod:`.rpc`
   answers calls, or relays them to the active instance.
3. :mod:`.transaction` prepares and unprepares claims: it contains the whole life of a claim.
   :mod:`.claim_table` has all claims and their checkpoint.
4. :mod:`.claim_reader` reads a claim from the API server. :mod:`.claims` reads its allocation and
   checks that it may have its devices. :mod:`.sharing` decides how claims share a device, and
   :mod:`.plugin_devices` knows what the device plugins have allocated.
5. :mod:`.dynamic_mig` creates MIG devices for the claim, with :mod:`.mig_create`.
6. :mod:`.sharing_setup` sets time slices and requests MPS daemons.
7. :mod:`.claim_specs` maintains the CDI specs that runtimes read; :mod:`.cdi` writes one, and
   :mod:`.metadata` writes the files that tell containers about their devices.
8. :mod:`.recovery` replaces a lost checkpoint; :mod:`.stale_claims` unprepares claims that no pod
   has.
9. :mod:`.driver` puts these together. :mod:`.discovery` finds the node's devices:
   :mod:`.mig_layout` parses NVML's answer about MIG, :mod:`.devices` describes each device.
10. :mod:`.slices` describes them as ResourceSlices, :mod:`.publishing` maintains these in the API
    server, and :mod:`.former_driver` deletes those of an earlier driver name.

The modules claims, devices, mig_layout, sharing and slices are pure.
"""
