/*
 * A simulated node's scenario, as the tables that nvml.c reads. library.py writes and compiles
 * them separately, so that the rest is compiled only once for all nodes.
 */

typedef unsigned int u32;
typedef unsigned long long u64;

struct profile {
    const char *name;
    u32 index, id, slices, instances, memory_slices, multiprocessors;
    u32 copy_engines, decoders, jpeg, ofa, first_id; /* of its GPU instances */
    u64 memory_mib;
    int starts[8]; /* ends with -1 */
};

struct gpu;
struct instance;

/* A compute instance, which is what NVML calls a MIG device. */
struct mig {
    const struct instance *instance;
    const char *uuid, *name;
    u32 id, slices, start, capability;
};

struct instance {
    const struct gpu *gpu;
    const struct profile *profile;
    u32 id, start, capability;
};

struct gpu {
    const char *name, *uuid, *serial, *vbios;
    u32 minor, domain, bus, device, pci_device, pci_subsystem;
    u32 architecture, major, minor_capability, brand, cores, multiprocessors;
    u32 milliwatts, graphics_mhz, memory_mhz, pcie_generation, pcie_lanes, numa_node;
    u64 memory_mib;
    int mig_capable, mig_mode;
    const struct profile *profiles; /* ends with a name of NULL */
};

extern const char NODE_DEV[], NODE_STATE[]; /* paths of directories on the node */
extern const char DRIVER_VERSION[], NVML_VERSION[];
extern const int CUDA_VERSION;
extern const u32 GPU_COUNT, INSTANCE_COUNT, MIG_COUNT; /* of the tables below */
extern const struct gpu GPUS[];
extern const struct instance INSTANCES[];
extern const struct mig MIG[];
