"""The documents of ``nvshim -o json`` and ``-o yaml``, as a JSON schema.

A table for each kind of :mod:`integration.cli.kinds`, and for its parts: a key, its type, and a
description. A type is one of JSON's, or a table's name; ``[]`` after it makes a list, ``?`` allows
null, and ``a|b`` lists the values of a string. Every key is always present, and there are no
others, so tests compare the commands' output with this schema.

Source: JSON Schema, draft 2020-12.
"""

from __future__ import annotations

import json
from typing import Any, Final

from integration.cli.kinds import API_VERSION, ERROR, HEALTH, HOLDINGS, KINDS

__all__ = ["schema", "text"]

_TABLES: Final = {
    # -- kinds: the documents themselves
    ERROR: """
        error         ErrorFields   why the command failed; on stderr
    """,
    "GpuList": "items  Gpu[]  the GPUs and MIG devices of the node, of every vendor",
    "NodeInfo": """
        nvshim            VersionFields  this program
        configuration     ConfigFile     the configuration that holds
        platform          string         nvml, tegra or wsl
        driver            object?        version, cuda, architecture, root, layout, why, libraries
        driver_error      CodeAndMessage?  why there is no driver
        module_version    string?        of the loaded kernel module
        roots             object[]       where a driver was looked for
        inventory         object?        where the list of GPUs is from, and how fresh it is
        layers            object?        of containers' root file systems: how many, and their space
        modules           object[]       kernel modules that matter to GPUs
        devices           object[]       device nodes
        gpus              object[]       as of GpuList, without containers
        installation      object         as of InstallationStatus
    """,
    "ProcessList": "items  Process[]  shims, fork servers and spares",
    "Usage": """
        time          number      seconds since the epoch
        driver        string?     its version
        failure       string?     why NVML has no answer
        notes         string[]    messages to display
        devices       Used[]      each GPU and MIG device
    """,
    "Version": "VersionFields",
    "VersionFields": """
        version       string      of this project
        revision      string?     of its source; null for a checkout
        path          string      where it is
        python        string      the interpreter's version
    """,
    "Explanation": """
        container     Container?      null for a config.json
        record        object?         the content of nvidia.json in the bundle, or what it would be
        given         Given?          devices that did not come from the shim
        end           End?            how it, or the previous attempt, exited because of a GPU fault
        hooks         string[]        of its spec, which the low-level runtime runs
        packages      PackageLack[]   of its image, which need a capability that it was not granted
        nothing       string?         why nothing was injected
        differences   Difference[]?   in the spec; null if not requested, or not known
        notes         string[]        messages to display
        configuration ConfigFile?     used for the result; null for a running container
    """,
    "CodeMeaning": """
        code          string      the complete code
        name          string      a short name
        meaning       string      the meaning of the code
        causes        string[]    possible causes, from the source code
        remedies      string[]    what to do
        command       string?     a command to run
        reference     string?     where to read more
    """,
    "DriverFile": """
        name          string      as requested
        capabilities  string[]    any of them includes it; empty if every container gets it
        driver        string?     the version of this node's driver
        paths         string[]    where it is on this node
        error         string?     why there is no driver
        packages      string[]    names of packages that are known to use it
    """,
    "DriverPackage": """
        name          string      as the index has it
        version       string      that was observed
        index         string      where it is from
        seen          string      when: year and month
        how           string[]    it was observed: traced, bare, names
        opens         string[]    the driver's files that it opened, in order
        mentions      string[]    further names in its binaries
        needs         string[]    the fewest driver capabilities
        also          object      what needs more, by capability
        other         string?     other files, programs and variables that decide
        without       string?     what happens without these capabilities
    """,
    "Examination": """
        node          Identity    which node it is
        healthy       boolean     whether there is no error
        counts        object      of error, warning and note
        checked       string[]    codes of the checks that ran
        skipped       string[]    codes of the checks that were left out
        findings      Finding[]   the worst first
    """,
    "CheckList": "items  Check[]  what the doctor looks for",
    "Verification": """
        node          VerifiedNode  which node it is
        passed        boolean     whether no check failed
        counts        object      of passed, failed and skipped
        seconds       number      that it took
        checks        Verified[]  in their order
    """,
    HOLDINGS: "items  Holding[]  the containers that hold a device",
    "LedgerCheck": """
        holdings      Holding[]   stale and orphaned ones
        unheld        Unheld[]    what the kubelet allocated and no container holds
        denied        Denied[]    what containers of pods requested and did not get
        foreign       Foreign[]?  GPU processes outside of containers; null without NVML's list
        unknown       string[]    why containers could not be read
    """,
    "FaultList": "items  Fault[]  faults that affected containers, the oldest first",
    "ClaimList": "items  Claim[]  by which [sharing] limits who may have a device",
    "Released": "released  string[]  the claims that were removed",
    "InstallationStatus": """
        prefix        string      where versions are
        bindir        string?     where the links are
        current       string?     the version in effect
        previous      string?     that before
        verified      boolean     whether every file was verified
        versions      Installed[] the newest first
        links         object[]    path, target, wanted, right
        unseen_shims  boolean     whether there may be shims that cannot be seen from here
        being_changed boolean     whether an installer is at work
        mentioned_in  string[]    files of engines that name the shim
        problems      string[]    what is wrong, with what to do
    """,
    "Settings": """
        file          string?     null for the defaults
        source        file|nvidia|default  whose file it is
        settings      SettingFields[]  each key
        notes         string[]    messages to display
    """,
    "Setting": "SettingFields",
    "SettingChange": """
        file          string      the changed file
        changed       boolean     whether it was
        would_change  boolean     whether anything differs
        diff          string      as diff -u has it
        notes         string[]    messages to display
    """,
    "SettingsCheck": """
        file          string?     null for the defaults
        valid         boolean     whether the shim would accept it
        error         CodeAndMessage?  what is wrong
        notes         string[]    messages to display
    """,
    "InstallerState": """
        state         string      what the installer of this container does
        message       string      the same as a sentence
    """,
    "DeviceStepList": "items  DeviceStep[]  nodes and links",
    "CdiDeviceList": """
        items         object[]    name, state, file
        faults        object[]    files that cannot be used
    """,
    "CdiCheckList": "items  CdiCheck[]  a file each",
    "Drain": """
        devices       OutOfService[]  what was taken out of service
        holders       DrainHolder[]  containers and processes that hold any of them
        free          boolean     whether there are no holders to wait for
    """,
    "Undrain": "devices  OutOfService[]  what is in service again, as it was before",
    "Reset": """
        device        string      UUID of the GPU, or its PCI address
        name          string      its usual name
        in_service    boolean     false if it had been out of service before
    """,
    "MigLayout": """
        layout        string      its name
        gpus          MigChange[]  the GPUs that it changes
        holders       DrainHolder[]  of a dry run, those that hold what would be destroyed
        applied       boolean     false for a dry run
    """,
    "MigDifference": """
        layout        string      its name
        gpus          MigChange[]  the GPUs that it would change
    """,
    "MigLayoutList": "items  MigLayoutState[]  the layouts of the file",
    HEALTH: "items  Health[]  the health of each device",
    "SimulatedNodeList": "items  object[]  as SimulatedNode",
    "ScenarioList": "items  Scenario[]  that are shipped",
    # -- what is in them
    "MigChange": """
        gpu           integer     its index
        uuid          string      its UUID
        mig_mode      boolean     whether it is in MIG mode then
        switches      boolean     whether its MIG mode is switched for that
        destroyed     MigInstance[]  the GPU instances that are destroyed
        created       MigInstance[]  those that are created
        kept          MigInstance[]  those that stay
    """,
    "MigInstance": """
        profile       string      of the GPU instance
        start         integer     the first of its memory slices
        devices       string[]    the profiles of its MIG devices
    """,
    "MigLayoutState": """
        name          string      of the layout
        state         applied|possible|impossible  whether the GPUs are so, or can be
        why           string?     why it is impossible
    """,
    "ErrorFields": """
        code          string      stable
        name          string      a short name
        asked         string      what was attempted
        found         string      what is wrong
        do            string      what to do; empty for nothing
        message       string      the line to display
    """,
    "CodeAndMessage": """
        code          string      of the error
        message       string      its line
    """,
    "ConfigFile": """
        file          string?     null for the defaults
        notes         string[]    messages to display
    """,
    "Gpu": """
        kind          gpu|mig     a whole GPU, or a MIG device
        vendor        string?     nvidia.com, amd.com, …
        index         integer?    of the GPU
        mig_index     integer?    of the MIG device
        uuid          string?     by which containers ask for it
        name          string?     of the model
        pci           string?     its address
        minor         integer?    of its device node
        profile       string?     of a MIG device
        mig_mode      boolean?    whether the GPU is divided
        memory_bytes  integer?    of the GPU
        numa_node     integer?    the socket that it hangs on
        fabric        Fabric?     its place in an NVLink fabric; null without one, or without NVML
        health        string?     healthy, suspect, unhealthy, recovering; null without an agent
        health_reason string?     why it is not healthy
        fault         string?     what a look at the node shows
        out_of_service string?    since when and why a person has taken it out of service
        excluded      boolean     by the configuration
        containers    Holder[]?   that have it; null if the caller may not know
    """,
    "Fabric": """
        state         string      of its registration: not-started, in-progress, completed
        cluster_uuid  string      of the cluster; empty if the fabric is that of one machine
        clique        integer?    the part of the cluster that it can reach
        health        string      healthy, unhealthy, limited-capacity; empty if unknown
        failure       string      why its registration failed; empty if it did not
    """,
    "Container": """
        id            string      containerd's
        namespace     string      containerd's
        pod           Pod?        of Kubernetes
        name          string?     its own name
        sandbox       boolean     whether it holds the pod's namespaces
        pid           integer?    of its first process; null if it does not run
    """,
    "Pod": """
        namespace     string      of Kubernetes
        name          string      of the pod
    """,
    "Holder": """
        +Container
        stale         string?     what of the driver that it was made with is gone
    """,
    "Process": """
        pid           integer     of the process
        kind          shim|fork-server|spare  what it is
        uid           integer     whose
        namespace     string?     of containerd
        id            string?     that the shim was started for
        pod           Pod?        of its containers
        containers    Served[]    that it serves
        gpus          string[]    UUIDs that they have
        gpu_indexes   any[]       of each of these, "0" or "0:1"; null for one that is not known
        memory        Memory?     null if it cannot be read
        version       string?     of this project
        tree          string?     that it runs from
        current       boolean?    whether that is the installed one
        warm          boolean?    whether a fork server has made it
        age_seconds   number      since it was started
        containerd    string?     the address of its containerd
        socket        string?     where it listens
        bundle        string?     null of a shim that has outlived it
    """,
    "Served": """
        +Container
        gpus          string[]    UUIDs that it has
        cause         string?     the fault of a GPU that ended it; null if it runs, or for none
    """,
    "End": """
        id            string      of the container that exited
        namespace     string      of containerd
        ended         number      seconds since the epoch
        exit_status   integer     its own
        told_status   integer     the status that the engine got
        cause         string      in a line
        gpus          string[]    UUIDs that it had
        faults        FaultFields[]  the oldest first
    """,
    "FaultFields": """
        at            number      seconds since the epoch
        kind          string      xid, sxid, gpu-lost, gpu-memory, mps, driver-lost, host-memory, …
        code          integer     the number of the Xid; 0 for other kinds
        name          string      in words
        gpu           string      UUID or PCI address; empty for none
        mig           string      UUID of the MIG device; empty for none
        pid           integer     on the host; 0 if it is not known
        whose         device|host|neighbour|application|unclear  whose fault it is
        sure          boolean     whether that is known
        action        string      what the node or its owner has to do; empty for nothing
        source        string      agent, or kernel log
    """,
    "Memory": """
        pss_bytes     integer     with its part of what it shares
        uss_bytes     integer     its own
    """,
    "Used": """
        index         string      "0", or "0:1" of a MIG device
        uuid          string      of the device
        kind          gpu|mig     what it is
        name          string?     of the model
        pci           string?     its address
        gpu_percent   integer?    of the time that kernels ran
        memory_percent integer?   of the time that memory was used
        memory_used_bytes integer?  of its memory
        memory_total_bytes integer?  of its memory
        encoder_percent integer?  of the encoder's time
        decoder_percent integer?  of the decoder's time
        temperature_celsius number?  of the GPU
        power_watts   number?     of the GPU
        energy_joules number?     since it is watched
        health        string?     its health state from the agent
        lost          any         whether it fell off the bus
        missing       object      why NVML does not tell one of these, by its key
        containers    object[]    what each uses
    """,
    "Given": """
        devices       object[]    GPUs and MIG devices
        nodes         string[]    in its spec
        unknown       string[]    UUIDs that the node does not have
        mounts        integer     how many of the driver's files its spec mounts
    """,
    "PackageLack": """
        name          string      of the package, as the table has it
        lacks         string[]    driver capabilities
    """,
    "Difference": """
        path          string      in the spec
        kind          added|removed|changed  what became of it
        before        any         null if it was added
        after         any         null if it was removed
    """,
    "Identity": """
        gpus          object[]    index, uuid, model
        driver        string?     its version
        driver_fault  string?     why there is none
        engine        string?     containerd or docker
        engine_version string?    that it says
        handlers      string[]    of ours
        found_by_name string?     the shim, where containerd finds it without a handler
        engine_fault  string?     why it could not be looked at
        version       string      of this program
        installed     string?     the version in effect
    """,
    "Finding": """
        code          string      of the check
        severity      error|warning|note  how bad it is
        title         string      what is wrong
        found         string      what is there
        remedy        string      what to do
        command       string      what to type; empty for nothing
        reference     string      where to read more; empty for nowhere
        unseen        boolean     whether the check could not look
        line          string      all of it in one line; empty for what has none
    """,
    "Check": """
        code          string      stable
        severity      error|warning|note  how bad it is
        title         string      what is wrong
        why           string      what comes of it
        remedy        string      what to do
        command       string      what to type; empty for nothing
        reference     string      where to read more; empty for nowhere
    """,
    "VerifiedNode": """
        version       string      of this program
        gpus          object[]    index, model, mig, lost
        driver        string      its version
        engine        string      containerd or cri-o
        engine_version string     that it says
        handler       string      that pods named
        kubelet       boolean     whether there is one
        policy        string      the mode of the policy
    """,
    "Verified": """
        name          string      of the check
        title         string      what it checks
        outcome       passed|failed|skipped  how it ended
        told          string?     what was seen, or why it was left out
        expected      string?     of a check that failed
        seen          string?     in place of that
        do            string?     what to do about it
        seconds       number      that it took
    """,
    "Holding": """
        +Container
        bundle        string      of the container
        devices       string[]    UUIDs of GPUs and MIG devices
        device_indexes any[]      of each of these, "0" or "0:1"; null for one that is not known
        gpus          string[]    UUIDs of the GPUs of these devices
        stale         string?     what is gone of the driver that it was created with
        orphan        string?     why no engine seems to know it
        shares        Share[]     shares of GPUs that it has by resource claims
        fault         string?     a recent fault of its GPUs
    """,
    "Share": """
        id            string      of the share
        device        string      UUID of the GPU
        memory_bytes  integer     of the share
        shares        integer     number of shares of the GPU
    """,
    "Unheld": """
        namespace     string      of the pod
        pod           string      its name
        container     string      its name in the pod
        resource      string      nvidia.com/gpu, say
        device        string      as the kubelet calls it
        pid           integer     of the container that runs without it; 0 if none does
        pod_uid       string      of its pod; empty if not known
    """,
    "Denied": """
        namespace     string      of the pod
        pod           string      its name
        pod_uid       string      empty if not known
        container     string      its name in the pod
        why           string      what it may not have, and why
    """,
    "Foreign": """
        pid           integer     of the process
        name          string?     of its program
        devices       string[]    UUIDs
    """,
    "Fault": """
        id            string      of the container
        namespace     string      containerd's
        pod           object?     its namespace and name
        name          string?     of the container
        at            number      seconds since the epoch
        kind          string      xid, sxid, gpu-lost, gpu-memory, mps, memory-limit, ...
        xid           integer?    the number of an Xid
        what          string      a message to display
        gpu           string?     UUID, or PCI address
        mig           string?     UUID of the MIG device
        pid           integer?    the process, in the node's pid namespace
        whose         device|host|neighbour|application|unclear  whose fault it was to the container
        sure          boolean     whether that is known
        do            string?     what to do
        source        string      which component reported it
    """,
    "Claim": """
        claim         string      its name
        container     string?     its container
        bundle        string?     of the container
        devices       string[]    UUIDs
        dead          boolean     whether it no longer counts
    """,
    "Installed": """
        name          string      of the version
        version       string?     of the project
        revision      string?     of its source
        architecture  string?     that it runs on
        python        string?     its interpreter's version
        digest        string?     of all its files
        role          string?     current or previous
        shims         integer     that run of it
        fork_servers  integer     that run of it
        other_processes integer   that run of it
        problem       string?     what is wrong with it
    """,
    "SettingFields": """
        key           string      TABLE.KEY
        value         any         as TOML has it
        origin        file|nvidia|default  where it is from
        wanted        string      which values it can have
    """,
    "DeviceStep": """
        kind          string      node or link
        path          string      of it
        numbers       string      major and minor
        state         string      what became of it
        reason        string      why it is there, or is not
    """,
    "CdiCheck": """
        file          string      that was checked
        kind          string?     vendor and class
        version       string?     of CDI
        devices       integer     how many
        valid         boolean     whether there are but warnings
        findings      object[]    what, weight, device, subject, found
    """,
    "OutOfService": """
        device        string      UUID, PCI address, or driver
        name          string      its usual name
        since         number?     seconds since the epoch
        reason        string?     the operator's reason
        reset         string?     the progress of a reset
        lets_go       boolean     whether the node agent closes NVML
        why           string      since when and why, in one line
    """,
    "DrainHolder": """
        kind          container|process|mps|persistenced|agent|module|kernel  what it is
        name          string      its usual name
        pid           integer?    a process of it
        devices       string[]    names of what it holds
        container     Container?  that it is, or is a process of
        do            string      how it lets go
    """,
    "Health": """
        uuid          string      of the device
        kind          gpu|mig     what it is
        gpu           string      UUID of its GPU
        state         healthy|suspect|unhealthy|recovering  its health state
        given         boolean     whether containers get it
        out_of_service string?    since when and why a person has taken it out of service
        since         number?     seconds since the epoch
        reason        string?     why
        xid           integer?    the last error of the driver that counted
        containers    string[]    that the reason is attributed to
        do            string?     what to do
    """,
    "Scenario": """
        name          string      for --scenario
        what          string      the node that it makes
    """,
}

# Other modules answer these, and describe their contents in their own references.
_OPEN: Final = (
    "Installation", "Uninstallation", "EngineChange", "PluginSettings", "SimulatedNode",
)  # fmt: skip

_JSON: Final = {"string", "integer", "number", "boolean", "object"}


def schema() -> dict[str, Any]:
    """Return the schema of all documents; ``$defs`` has one for each kind."""
    kinds = sorted(
        {*KINDS.values(), ERROR, "CodeMeaning", "CheckList", "DriverFile", "DriverPackage"}
    )
    tables = {name: _object(name) for name in _TABLES if name not in kinds}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What nvshim answers with -o json and -o yaml",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds],
        "$defs": {**{kind: _document(kind) for kind in kinds}, **tables},
    }


def text() -> str:
    """Return the text of the reference's file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _document(kind: str) -> dict[str, Any]:
    heads = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}}
    if kind in _OPEN:
        return {"type": "object", "properties": heads, "required": [*heads]}
    return _closed({**heads, **_fields(kind)})


def _object(name: str) -> dict[str, Any]:
    return _closed(_fields(name))


def _closed(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


def _fields(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in _TABLES[name].strip().splitlines():
        key, *rest = line.split(maxsplit=2)
        if not rest:
            found |= _fields(key.removeprefix("+"))
        else:
            found[key] = {"description": rest[1], **_type(rest[0])}
    return found


def _type(word: str) -> dict[str, Any]:
    if word.endswith("?"):
        return {"anyOf": [_type(word[:-1]), {"type": "null"}]}
    if word.endswith("[]"):
        return {"type": "array", "items": _type(word[:-2])}
    if word == "any":
        return {}
    if word in _JSON:
        return {"type": word}
    if "|" in word:
        return {"enum": word.split("|")}
    return {"$ref": f"#/$defs/{word}"}
