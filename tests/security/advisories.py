"""The table of known advisories, each with the tests that show that it does not affect us.

The key is a CVE, or another name of the advisory. A row lists tests as FILE::TEST, or says why the
advisory does not apply. docs/security.md shows the table.

Source: NVIDIA's security bulletins; the advisories of runc, crun and containerd.
"""

from __future__ import annotations

from typing import Final

CONTAINERS: Final = "security/test_hostile_containers.py"
IMAGES: Final = "security/test_hostile_images.py"
HERE: Final = "security/test_advisories.py"
GRANTS: Final = "e2e/cri/test_cri_grants.py"

LINKS: Final = (
    f"{CONTAINERS}::test_a_link_at_every_directory_leads_nowhere",
    f"{CONTAINERS}::test_links_at_all_places_at_once_lead_nowhere",
    f"{IMAGES}::test_a_link_at_any_place_leads_nowhere_outside",
)
RACES: Final = (
    f"{CONTAINERS}::test_a_volume_that_another_container_changes_leads_nowhere",
    f"{CONTAINERS}::test_a_rootfs_that_another_container_changes_leads_nowhere",
    f"{IMAGES}::test_a_directory_that_becomes_a_link_at_any_moment_leads_nowhere",
    (
        "unit/hooks/image/test_directory_changes.py::"
        "test_what_is_put_in_the_place_of_a_new_thing_is_not_given_away"
    ),
)

COVERED: Final[dict[str, tuple[str, ...]]] = {
    # NVIDIA's container toolkit and libnvidia-container
    "CVE-2024-0132": (*LINKS, *RACES),
    "CVE-2024-0133": (
        *LINKS,
        f"{CONTAINERS}::test_a_file_system_that_takes_no_writes_gets_none",
        f"{IMAGES}::test_the_kernel_is_only_ever_asked_for_single_names_or_by_openat2",
    ),
    "CVE-2024-0134": (
        *LINKS,
        "unit/hooks/image/test_placement.py::test_plan_in_an_image",
    ),
    "CVE-2024-0135": (
        f"{CONTAINERS}::test_programs_of_the_host_cannot_be_overwritten",
        "unit/hooks/edits/test_mutation.py::test_result_with_any_other_change_does_not_leave",
    ),
    "CVE-2024-0136": (
        "unit/hooks/test_config.py::test_mistake_is_named",
        "unit/hooks/edits/test_mutation.py::test_planned_device_of_another_driver_does_not_leave",
    ),
    "CVE-2024-0137": (
        f"{HERE}::test_nothing_is_executed_but_by_the_one_function_for_it",
        f"{CONTAINERS}::test_variables_of_the_image_are_nobody_elses",
    ),
    "CVE-2025-23359": (*LINKS, *RACES),
    "CVE-2025-23266": (f"{CONTAINERS}::test_variables_of_the_image_are_nobody_elses",),
    "CVE-2025-23267": (
        f"{CONTAINERS}::test_files_of_the_loader_of_any_content_harm_nobody",
        f"{CONTAINERS}::test_what_is_no_file_blocks_nothing_and_fills_nothing",
        "fuzz/test_fuzz_corpus.py::test_mutations_of_the_corpus_are_taken_or_refused",
    ),
    "CVE-2026-24260": (
        *RACES,
        f"{IMAGES}::test_the_kernel_is_only_ever_asked_for_single_names_or_by_openat2",
    ),
    "params mount with shared propagation": (
        f"{CONTAINERS}::test_no_mount_reaches_the_host_whatever_its_propagation",
    ),
    "environment of the image as a grant": (
        f"{HERE}::test_volume_that_an_image_declares_is_no_grant",
    ),
    "the name of a GPU as a grant": (
        f"{GRANTS}::test_pod_that_knows_the_uuid_of_another_pods_gpu_does_not_get_it",
        f"{GRANTS}::test_no_way_of_asking_gives_a_gpu_that_the_kubelet_did_not_give",
        f"{GRANTS}::test_nothing_that_an_engine_hands_on_of_a_pods_annotations_makes_it_another",
        f"{GRANTS}::test_record_is_of_one_container_and_of_one_pod",
    ),
    # runc and crun: the shim does not make these worse
    "CVE-2019-5736": (f"{CONTAINERS}::test_programs_of_the_host_cannot_be_overwritten",),
    "CVE-2021-30465": RACES,
    "CVE-2024-21626": (
        f"{CONTAINERS}::test_no_descriptor_is_there_to_stand_in",
        f"{CONTAINERS}::test_variables_of_the_image_are_nobody_elses",
        f"{HERE}::test_a_program_has_three_descriptors_whatever_else_is_open",
    ),
    "CVE-2024-45310": RACES,
    "CVE-2025-31133, -52565, -52881": (
        f"{CONTAINERS}::test_a_link_at_every_directory_leads_nowhere",
        "unit/hooks/edits/test_mutation.py::test_planned_mount_outside_the_rules_does_not_leave",
    ),
    "CVE-2026-41579": (f"{CONTAINERS}::test_dev_that_is_a_link_leads_nowhere",),
    "CVE-2026-47766": (f"{CONTAINERS}::test_dev_that_is_a_link_leads_nowhere",),
    # containerd and shims
    "CVE-2020-15257": (
        f"{HERE}::test_a_shim_is_reached_by_root_alone_and_leaves_nothing_open_to_others",
        (
            "unit/ttrpc/test_ttrpc_peers.py::"
            "test_only_our_user_with_our_group_is_served_and_others_get_not_a_byte"
        ),
    ),
    "CVE-2024-25621": (
        f"{HERE}::test_a_shim_is_reached_by_root_alone_and_leaves_nothing_open_to_others",
        "unit/verbs/test_sockets.py::test_the_directory_is_made_for_us_alone",
    ),
    "CVE-2022-23471, -31030, CVE-2025-64329, CVE-2026-53495": (
        "e2e/test_shim_growth.py::test_execs_and_resizes_leave_no_descriptor_task_or_memory",
        "e2e/test_shim_growth.py::test_execs_that_nobody_deletes_keep_no_descriptor",
    ),
    "CVE-2026-53488": (
        "e2e/test_shim_loggers.py::test_only_loggers_that_the_operator_allows_are_started",
    ),
    "CVE-2026-53492": (f"{HERE}::test_nothing_in_a_checkpoint_is_a_request",),
    "CVE-2026-53489, -50195": (
        "unit/shim/test_criu.py::test_checkpoint_that_is_none_is_refused",
        "unit/shim/test_criu.py::test_parent_elsewhere_is_followed_only_if_it_is_named",
    ),
    "CVE-2026-47262, -46680": (f"{CONTAINERS}::test_a_huge_list_of_users_costs_nothing",),
    "RUN-003": (
        f"{HERE}::test_nothing_is_executed_but_by_the_one_function_for_it",
        (
            "unit/verbs/test_invocation.py::"
            "test_an_unsafe_id_or_namespace_is_refused_before_it_can_be_a_path"
        ),
        f"{HERE}::test_ids_that_are_paths_are_refused",
    ),
}

NOT_OURS: Final = {
    "KDP#1137": "the device plugin imports the toolkit's packages; we import none of them",
    "CVE-2026-24187, -24196, -24199": "memory errors of the kernel driver, behind any ioctl",
    "CVE-2026-30892": "crun exec -u: we give an exec as a file of a process, and no such flag",
    "CVE-2025-47290, CVE-2021-32760, CVE-2024-40635": "containerd's, when it unpacks an image",
    "GHSA-rp3h-jf77-q9p4": "containerd's; fixed with CVE-2026-53495",
}

MECHANISM: Final[dict[str, str]] = {
    "CVE-2024-0132": "a path of the image was checked, and another one mounted (toolkit 1.16.2)",
    "CVE-2024-0133": "links of an image had empty files made on the host (1.16.2)",
    "CVE-2024-0134": "links were made through links of the image (1.17.0)",
    "CVE-2024-0135": "the host's ldconfig could be changed from the container (1.17.3)",
    "CVE-2024-0136": "host devices by way of an image's ldconfig (1.17.3)",
    "CVE-2024-0137": "an image's program in the host's network (1.17.3)",
    "CVE-2025-23359": "the first one again, by other links (1.17.4)",
    "CVE-2025-23266": "a hook had the image's LD_PRELOAD, with the rootfs as directory (1.17.8)",
    "CVE-2025-23267": "the loader's cache was written through links of the image (1.17.8)",
    "CVE-2026-24260": "hooks checked paths below the rootfs, and then used them (1.19.1)",
    "params mount with shared propagation": "a mount in the container reached the host (1.18)",
    "environment of the image as a grant": "an image got devices that no policy had granted",
    "the name of a GPU as a grant": "a pod named another's GPU, whose UUID it had read in procfs",
    "CVE-2019-5736": "the container overwrote runc by /proc/self/exe",
    "CVE-2021-30465": "links were exchanged at mount targets",
    "CVE-2024-21626": "a directory's descriptor was left open in the container",
    "CVE-2024-45310": "empty files on the host by a race",
    "CVE-2025-31133, -52565, -52881": "masked paths and the console by links of the image",
    "CVE-2026-41579": "runc made devices in an image's link /dev",
    "CVE-2026-47766": "the same in crun",
    "CVE-2020-15257": "a shim's abstract socket, open to containers of the host's network",
    "CVE-2024-25621": "directories of state that others could read",
    "CVE-2022-23471, -31030, CVE-2025-64329, CVE-2026-53495": (
        "memory that grew with each exec or resize"
    ),
    "CVE-2026-53488": "a label of an image named a program as logger, and it ran as root",
    "CVE-2026-53492": "annotations in a checkpoint gave devices",
    "CVE-2026-53489, -50195": "links in a checkpoint",
    "CVE-2026-47262, -46680": "huge files of users and groups",
    "RUN-003": "words of a spec that became a command line or a path",
}
"""The defect of each advisory, by the same keys; in brackets, the release that fixed it."""
