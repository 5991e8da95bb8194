"""Names and numbers on the wire, against a table written down from the APIs of others."""

from __future__ import annotations

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor

from api.proto import (  # noqa: F401 - importing them registers the messages
    bootstrap_pb2,
    cgroups_v1_pb2,
    cgroups_v2_pb2,
    dra_health_pb2,
    dra_pb2,
    events_pb2,
    events_service_pb2,
    linux_runc_pb2,
    pluginregistration_pb2,
    runc_options_pb2,
    runtimeoptions_pb2,
    task_pb2,
    task_types_pb2,
    ttrpc_pb2,
    types_pb2,
)

POOL = descriptor_pool.Default()
DRA = "k8s.io.kubelet.pkg.apis.dra.v1"

# Message: "name number" of its fields; all of them, so that one too many is found as well.
FIELDS = {
    "ttrpc.Request": "service 1, method 2, payload 3, timeout_nano 4, metadata 5",
    "ttrpc.Response": "status 1, payload 2",
    "ttrpc.KeyValue": "key 1, value 2",
    "ttrpc.Status": "code 1, message 2, details 3",
    "containerd.task.v2.CreateTaskRequest": (
        "id 1, bundle 2, rootfs 3, terminal 4, stdin 5, stdout 6, stderr 7, checkpoint 8, "
        "parent_checkpoint 9, options 10"
    ),
    "containerd.task.v2.CreateTaskResponse": "pid 1",
    "containerd.task.v2.DeleteRequest": "id 1, exec_id 2",
    "containerd.task.v2.DeleteResponse": "pid 1, exit_status 2, exited_at 3",
    "containerd.task.v2.ExecProcessRequest": (
        "id 1, exec_id 2, terminal 3, stdin 4, stdout 5, stderr 6, spec 7"
    ),
    "containerd.task.v2.ResizePtyRequest": "id 1, exec_id 2, width 3, height 4",
    "containerd.task.v2.StateRequest": "id 1, exec_id 2",
    "containerd.task.v2.StateResponse": (
        "id 1, bundle 2, pid 3, status 4, stdin 5, stdout 6, stderr 7, terminal 8, "
        "exit_status 9, exited_at 10, exec_id 11"
    ),
    "containerd.task.v2.KillRequest": "id 1, exec_id 2, signal 3, all 4",
    "containerd.task.v2.CloseIORequest": "id 1, exec_id 2, stdin 3",
    "containerd.task.v2.PidsRequest": "id 1",
    "containerd.task.v2.PidsResponse": "processes 1",
    "containerd.task.v2.CheckpointTaskRequest": "id 1, path 2, options 3",
    "containerd.task.v2.UpdateTaskRequest": "id 1, resources 2, annotations 3",
    "containerd.task.v2.StartRequest": "id 1, exec_id 2",
    "containerd.task.v2.StartResponse": "pid 1",
    "containerd.task.v2.WaitRequest": "id 1, exec_id 2",
    "containerd.task.v2.WaitResponse": "exit_status 1, exited_at 2",
    "containerd.task.v2.StatsRequest": "id 1",
    "containerd.task.v2.StatsResponse": "stats 1",
    "containerd.task.v2.ConnectRequest": "id 1",
    "containerd.task.v2.ConnectResponse": "shim_pid 1, task_pid 2, version 3",
    "containerd.task.v2.ShutdownRequest": "id 1, now 2",
    "containerd.task.v2.PauseRequest": "id 1",
    "containerd.task.v2.ResumeRequest": "id 1",
    "containerd.v1.types.ProcessInfo": "pid 1, info 2",
    "containerd.types.Mount": "type 1, source 2, target 3, options 4",
    "containerd.types.Envelope": "timestamp 1, namespace 2, topic 3, event 4",
    "containerd.types.RuntimeInfo": "name 1, version 2, options 3, features 4, annotations 5",
    "containerd.types.RuntimeVersion": "version 1, revision 2",
    "containerd.services.events.ttrpc.v1.ForwardRequest": "envelope 1",
    "containerd.events.TaskCreate": (
        "container_id 1, bundle 2, rootfs 3, io 4, checkpoint 5, pid 6"
    ),
    "containerd.events.TaskStart": "container_id 1, pid 2",
    "containerd.events.TaskDelete": "container_id 1, pid 2, exit_status 3, exited_at 4, id 5",
    "containerd.events.TaskIO": "stdin 1, stdout 2, stderr 3, terminal 4",
    "containerd.events.TaskExit": "container_id 1, id 2, pid 3, exit_status 4, exited_at 5",
    "containerd.events.TaskOOM": "container_id 1",
    "containerd.events.TaskExecAdded": "container_id 1, exec_id 2",
    "containerd.events.TaskExecStarted": "container_id 1, exec_id 2, pid 3",
    "containerd.events.TaskPaused": "container_id 1",
    "containerd.events.TaskResumed": "container_id 1",
    "containerd.events.TaskCheckpointed": "container_id 1, checkpoint 2",
    "containerd.linux.runc.CreateOptions": (
        "no_pivot_root 1, open_tcp 2, external_unix_sockets 3, terminal 4, file_locks 5, "
        "empty_namespaces 6, cgroups_mode 7, no_new_keyring 8, shim_cgroup 9, io_uid 10, "
        "io_gid 11, criu_work_path 12, criu_image_path 13"
    ),
    "containerd.linux.runc.CheckpointOptions": (
        "exit 1, open_tcp 2, external_unix_sockets 3, terminal 4, file_locks 5, "
        "empty_namespaces 6, cgroups_mode 7, work_path 8, image_path 9"
    ),
    "containerd.runc.v1.Options": (
        "no_pivot_root 1, no_new_keyring 2, shim_cgroup 3, io_uid 4, io_gid 5, binary_name 6, "
        "root 7, criu_path 8, systemd_cgroup 9, criu_image_path 10, criu_work_path 11, "
        "task_api_address 12, task_api_version 13"
    ),
    "containerd.runc.v1.CheckpointOptions": (
        "exit 1, open_tcp 2, external_unix_sockets 3, terminal 4, file_locks 5, "
        "empty_namespaces 6, cgroups_mode 7, image_path 8, work_path 9, parent_path 10"
    ),
    "containerd.runc.v1.ProcessDetails": "exec_id 1",
    "runtimeoptions.v1.Options": "type_url 1, config_path 2, config_body 3",
    "containerd.runtime.bootstrap.v1.BootstrapParams": (
        "instance_id 1, namespace 2, log_level 3, containerd_version 4, "
        "containerd_ttrpc_address 5, containerd_grpc_address 6, containerd_binary 7, "
        "extensions 8, socket_dir 9"
    ),
    "containerd.runtime.bootstrap.v1.BootstrapResult": (
        "version 1, address 2, protocol 3, capabilities 4, metadata 5"
    ),
    "io.containerd.cgroups.v1.Metrics": (
        "hugetlb 1, pids 2, cpu 3, memory 4, blkio 5, rdma 6, network 7, cgroup_stats 8, "
        "memory_oom_control 9"
    ),
    "io.containerd.cgroups.v1.HugetlbStat": "usage 1, max 2, failcnt 3, pagesize 4",
    "io.containerd.cgroups.v1.PidsStat": "current 1, limit 2",
    "io.containerd.cgroups.v1.CPUStat": "usage 1, throttling 2",
    "io.containerd.cgroups.v1.CPUUsage": "total 1, kernel 2, user 3, per_cpu 4",
    "io.containerd.cgroups.v1.Throttle": "periods 1, throttled_periods 2, throttled_time 3",
    "io.containerd.cgroups.v1.MemoryStat": (
        "cache 1, rss 2, rss_huge 3, mapped_file 4, dirty 5, writeback 6, pg_pg_in 7, "
        "pg_pg_out 8, pg_fault 9, pg_maj_fault 10, inactive_anon 11, active_anon 12, "
        "inactive_file 13, active_file 14, unevictable 15, hierarchical_memory_limit 16, "
        "hierarchical_swap_limit 17, total_cache 18, total_rss 19, total_rss_huge 20, "
        "total_mapped_file 21, total_dirty 22, total_writeback 23, total_pg_pg_in 24, "
        "total_pg_pg_out 25, total_pg_fault 26, total_pg_maj_fault 27, total_inactive_anon 28, "
        "total_active_anon 29, total_inactive_file 30, total_active_file 31, "
        "total_unevictable 32, usage 33, swap 34, kernel 35, kernel_tcp 36"
    ),
    "io.containerd.cgroups.v1.MemoryEntry": "limit 1, usage 2, max 3, failcnt 4",
    "io.containerd.cgroups.v1.MemoryOomControl": "oom_kill_disable 1, under_oom 2, oom_kill 3",
    "io.containerd.cgroups.v1.BlkIOStat": (
        "io_service_bytes_recursive 1, io_serviced_recursive 2, io_queued_recursive 3, "
        "io_service_time_recursive 4, io_wait_time_recursive 5, io_merged_recursive 6, "
        "io_time_recursive 7, sectors_recursive 8"
    ),
    "io.containerd.cgroups.v1.BlkIOEntry": "op 1, device 2, major 3, minor 4, value 5",
    "io.containerd.cgroups.v1.RdmaStat": "current 1, limit 2",
    "io.containerd.cgroups.v1.RdmaEntry": "device 1, hca_handles 2, hca_objects 3",
    "io.containerd.cgroups.v1.NetworkStat": (
        "name 1, rx_bytes 2, rx_packets 3, rx_errors 4, rx_dropped 5, tx_bytes 6, "
        "tx_packets 7, tx_errors 8, tx_dropped 9"
    ),
    "io.containerd.cgroups.v1.CgroupStats": (
        "nr_sleeping 1, nr_running 2, nr_stopped 3, nr_uninterruptible 4, nr_io_wait 5"
    ),
    "io.containerd.cgroups.v2.Metrics": (
        "pids 1, cpu 2, memory 4, rdma 5, io 6, hugetlb 7, memory_events 8, network 9"
    ),
    "io.containerd.cgroups.v2.PSIData": "avg10 1, avg60 2, avg300 3, total 4",
    "io.containerd.cgroups.v2.PSIStats": "some 1, full 2",
    "io.containerd.cgroups.v2.PidsStat": "current 1, limit 2",
    "io.containerd.cgroups.v2.CPUStat": (
        "usage_usec 1, user_usec 2, system_usec 3, nr_periods 4, nr_throttled 5, "
        "throttled_usec 6, psi 7, nr_bursts 8, burst_usec 9"
    ),
    "io.containerd.cgroups.v2.MemoryStat": (
        "anon 1, file 2, kernel_stack 3, slab 4, sock 5, shmem 6, file_mapped 7, file_dirty 8, "
        "file_writeback 9, anon_thp 10, inactive_anon 11, active_anon 12, inactive_file 13, "
        "active_file 14, unevictable 15, slab_reclaimable 16, slab_unreclaimable 17, "
        "pgfault 18, pgmajfault 19, workingset_refault 20, workingset_activate 21, "
        "workingset_nodereclaim 22, pgrefill 23, pgscan 24, pgsteal 25, pgactivate 26, "
        "pgdeactivate 27, pglazyfree 28, pglazyfreed 29, thp_fault_alloc 30, "
        "thp_collapse_alloc 31, usage 32, usage_limit 33, swap_usage 34, swap_limit 35, "
        "max_usage 36, swap_max_usage 37, psi 38, workingset_refault_anon 39, "
        "workingset_refault_file 40, workingset_activate_anon 41, workingset_activate_file 42"
    ),
    "io.containerd.cgroups.v2.MemoryEvents": (
        "low 1, high 2, max 3, oom 4, oom_kill 5, oom_group_kill 6"
    ),
    "io.containerd.cgroups.v2.RdmaStat": "current 1, limit 2",
    "io.containerd.cgroups.v2.RdmaEntry": "device 1, hca_handles 2, hca_objects 3",
    "io.containerd.cgroups.v2.IOStat": "usage 1, psi 2",
    "io.containerd.cgroups.v2.IOEntry": "major 1, minor 2, rbytes 3, wbytes 4, rios 5, wios 6",
    "io.containerd.cgroups.v2.HugeTlbStat": "current 1, max 2, pagesize 3, failcnt 4",
    "io.containerd.cgroups.v2.NetworkStat": (
        "name 1, rx_bytes 2, rx_packets 3, rx_errors 4, rx_dropped 5, tx_bytes 6, "
        "tx_packets 7, tx_errors 8, tx_dropped 9"
    ),
    "pluginregistration.PluginInfo": "type 1, name 2, endpoint 3, supported_versions 4",
    "pluginregistration.RegistrationStatus": "plugin_registered 1, error 2",
    f"{DRA}.Claim": "namespace 1, uid 2, name 3",
    f"{DRA}.NodePrepareResourcesRequest": "claims 1",
    f"{DRA}.NodePrepareResourcesResponse": "claims 1",
    f"{DRA}.NodePrepareResourceResponse": "devices 1, error 2",
    f"{DRA}.Device": ("request_names 1, pool_name 2, device_name 3, cdi_device_ids 4, share_id 5"),
    f"{DRA}.NodeUnprepareResourcesRequest": "claims 1",
    f"{DRA}.NodeUnprepareResourcesResponse": "claims 1",
    f"{DRA}.NodeUnprepareResourceResponse": "error 1",
    "v1.NodeWatchResourcesResponse": "devices 1",
    "v1.DeviceIdentifier": "pool_name 1, device_name 2",
    "v1.DeviceHealth": (
        "device 1, health 2, last_updated_time 3, health_check_timeout_seconds 4, message 5"
    ),
}

# Where a wrong type would still decode, into something else.
TYPES = {
    "ttrpc.Request.payload": FieldDescriptor.TYPE_BYTES,
    "ttrpc.Request.timeout_nano": FieldDescriptor.TYPE_INT64,
    "ttrpc.Response.payload": FieldDescriptor.TYPE_BYTES,
    "ttrpc.Status.code": FieldDescriptor.TYPE_INT32,
    "containerd.task.v2.KillRequest.signal": FieldDescriptor.TYPE_UINT32,
    "containerd.task.v2.WaitResponse.exit_status": FieldDescriptor.TYPE_UINT32,
    "containerd.task.v2.StateResponse.status": FieldDescriptor.TYPE_ENUM,
    "containerd.events.TaskExit.exit_status": FieldDescriptor.TYPE_UINT32,
    "containerd.runtime.bootstrap.v1.BootstrapResult.version": FieldDescriptor.TYPE_INT32,
    "runtimeoptions.v1.Options.config_body": FieldDescriptor.TYPE_BYTES,
    "io.containerd.cgroups.v1.MemoryEntry.limit": FieldDescriptor.TYPE_UINT64,
    "io.containerd.cgroups.v1.RdmaEntry.hca_handles": FieldDescriptor.TYPE_UINT32,
    "io.containerd.cgroups.v2.PSIData.avg10": FieldDescriptor.TYPE_DOUBLE,
    "io.containerd.cgroups.v2.PSIData.total": FieldDescriptor.TYPE_UINT64,
    "v1.DeviceHealth.health": FieldDescriptor.TYPE_ENUM,
    "v1.DeviceHealth.last_updated_time": FieldDescriptor.TYPE_INT64,
}

METHODS = (
    "State Create Start Delete Pids Pause Resume Checkpoint Kill Exec ResizePty CloseIO Update "
    "Wait Stats Connect Shutdown"
)
ANSWERED_WITH_NOTHING = {
    "Pause", "Resume", "Checkpoint", "Kill", "Exec", "ResizePty", "CloseIO", "Update", "Shutdown",
}  # fmt: skip


def test_the_fields_of_a_message_have_their_numbers() -> None:
    found = {name: POOL.FindMessageTypeByName(name).fields for name in FIELDS}
    assert {
        name: ", ".join(f"{field.name} {field.number}" for field in fields)
        for name, fields in found.items()
    } == FIELDS


def test_a_field_has_its_type() -> None:
    for name, kind in TYPES.items():
        message, _, field = name.rpartition(".")
        found = POOL.FindMessageTypeByName(message).fields_by_name[field]
        assert found.type == kind, name


def test_the_status_of_a_process_has_its_numbers() -> None:
    values = task_types_pb2.Status.items()
    assert values == [
        ("UNKNOWN", 0), ("CREATED", 1), ("RUNNING", 2), ("STOPPED", 3), ("PAUSED", 4),
        ("PAUSING", 5),
    ]  # fmt: skip


def test_the_task_service_has_its_methods_and_answers() -> None:
    service = task_pb2.DESCRIPTOR.services_by_name["Task"]
    assert service.full_name == "containerd.task.v2.Task"
    assert [method.name for method in service.methods] == METHODS.split()
    empty = {
        method.name
        for method in service.methods
        if method.output_type.full_name == "google.protobuf.Empty"
    }
    assert empty == ANSWERED_WITH_NOTHING


def test_the_events_service_takes_envelopes() -> None:
    service = events_service_pb2.DESCRIPTOR.services_by_name["Events"]
    assert service.full_name == "containerd.services.events.ttrpc.v1.Events"
    (method,) = service.methods
    assert (method.name, method.input_type.name) == ("Forward", "ForwardRequest")
    assert method.output_type.full_name == "google.protobuf.Empty"


def test_bytes_written_down_from_the_wire_decode_to_what_they_say() -> None:
    # A Go client's request, as hand-decoded: service "s", method "m", payload, 5 s, one pair.
    text = "0a 01 73 12 01 6d 1a 02 0a 00 20 80 e4 97 d0 12 2a 06 0a 01 6b 12 01 76"
    request = ttrpc_pb2.Request.FromString(bytes.fromhex(text))
    assert (request.service, request.method, request.payload) == ("s", "m", b"\n\x00")
    assert request.timeout_nano == 5_000_000_000
    assert [(pair.key, pair.value) for pair in request.metadata] == [("k", "v")]
