"""The one reader of this node's containers, processes, cgroups and users of device nodes.

No other room of integration opens a file below a process's directory or a bundle. A reader in this
room checks the namespaces and the owner of a process first. It reads only what the kernel prints,
follows no link of a process, and limits everything that a tenant can multiply. Reads that may still
block are left to a child with a deadline. Other rooms use::

    bundles         Container, find_containers: the containers with a task in containerd
    bundle_watch    watched_directories: where a change means that containers come or go
    shims           all_containers, find_shims: shims, fork servers and spares, by proof
    owners          Owners: the container of a process
    held_devices    Holders, devices_of: the devices that a container holds
    device_users    device_users: the processes that have a device node open or mapped
    tree_users      tree_users: the processes that execute or map files of an installed tree
    mount_users     mount_users: the processes that have a directory mounted
    node_processes  host_processes, node_processes: processes by name
    procfs          Procfs: one fact of a process (status, words, users, cgroup, mounts, memory)
    cgroups         cgroups_in, own_cgroup: what /proc/PID/cgroup says
    exit_causes     find_ends: containers that a GPU fault has ended
    records         entries, strings: lists in the record of an injection
    shares          Share, shares_of: the shares of GPUs of resource claims
    shim_client     kill, call: the API of a shim, without containerd
    verify_pods     left_pods: what a killed nvshim verify has left
    traces          find, remove: what a private containerd leaves on the machine
    errors          InspectionError: E251x

Below them: bounded_reader and its child, memory (PSS and USS), trees (the version that a process
runs).
"""
