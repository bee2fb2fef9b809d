"""Every C function that other files may call is called by one of them.

What nothing calls goes, what only tests call lives in the tests, and what one file
calls is static there.
"""

from helpers.c_calls import SOURCES, names, uses_of

# Called by tests alone, and meant to be.
SEAMS = {
    "fsdp_alloc_fail_at": "lets an allocation fail",
    "fsdp_alloc_live": "finds leaks",
    "fsdp_crc32c_by_table": "the path of processors without the instruction",
    "fsdp_host_pages_kept_nbytes": "finds pages that are kept",
    "fsdp_host_priv_lanes_at": "the paths of other processors",
    "fsdp_nccl_priv_has_watchdog": "whether the thread has ended",
    "fsdp_placement_create": "a placement of any pieces",
    "fsdp_unit_event_name": "names in the table of transitions",
}


def test_functions_are_called() -> None:
    used = {name for path in SOURCES for name in uses_of(path)}
    defined = {name for name in names().functions if name.startswith("fsdp_")}
    found = defined - used
    assert found == set(SEAMS), (
        f"called by no other file: {sorted(found - set(SEAMS))}; "
        f"not seams any more: {sorted(set(SEAMS) - found)}"
    )
