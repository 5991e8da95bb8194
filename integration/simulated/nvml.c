/*
 * The NVML of a simulated node: what libnvidia-ml.so.1 would report about the simulated GPUs.
 *
 * The node's scenario is linked in as tables (nvml.h, written by library.py). A GPU is reported
 * only while its device node exists, because the real library can only open those. On the node
 * itself we look in the simulated dev directory; in a container, where that does not exist, in
 * /dev. So a container that was granted GPU 1 sees one GPU, number 0. A MIG device also needs the
 * nodes of its two capabilities.
 *
 * Every function that the driver's own library exports and this file does not define returns
 * NVML_ERROR_NOT_SUPPORTED (unsupported.h, also written by library.py). So programs that look up
 * more functions than they need, such as nvidia-smi, find all of them.
 *
 * Faults, for testing callers of NVML. They are read from the environment variable
 * NVSHIM_SIMULATED_FAULTS and from the file nvml-faults in the node's state directory, separated
 * by blanks or line ends; a line that starts with '#' is a comment. The file is read by nvmlInit,
 * and after a change by the next call or wait for an event:
 *
 *     nvmlInit=hang                 any function, named without its version, never returns
 *     nvmlInit=sleep:1500           … returns 1500 ms late
 *     nvmlDeviceGetName=error:15    … returns this nvmlReturn_t
 *     nvmlDeviceGetUUID=crash       … kills the process with SIGSEGV
 *     gpu1=error:15                 every query about GPU 1 of the scenario: it is lost
 *     gpu1.nvmlDeviceGetName=error:999   only that function, and only for GPU 1
 *     any=hang                      any function
 *     count=7                       nvmlDeviceGetCount returns a wrong number
 *     driver=550.54.15              nvmlSystemGetDriverVersion returns a wrong version
 *
 * Events come from the file nvml-events in the state directory. Each line that is added to it
 * after an event set was made is one event: "INDEX TYPE DATA [GPU-INSTANCE COMPUTE-INSTANCE]",
 * all numbers, TYPE 8 for an Xid ("0 8 79": GPU 0 has fallen off the bus), 32768 for a changed
 * recovery action.
 *
 * The GPUs' activity is in files of the state directory too. Each call reads them; they contain
 * numbers, a line per entry; lines that start with '#' are comments:
 *
 *     nvml-processes   [g|m] INDEX PID BYTES [GPU-INSTANCE COMPUTE-INSTANCE] [SM MEMORY ENC DEC]
 *                      a process on a GPU and its usage in percent; g for a graphics process, m for
 *                      a client of MPS
 *     nvml-facts       INDEX NAME VALUE
 *                      other values of a GPU: gpu, memory, encoder, decoder (percent; by default
 *                      the sum of the processes), temperature (degrees), milliwatts, throttle
 *                      (bits), millijoules (in addition to the idle energy), and counts:
 *                      ecc-corrected, ecc-uncorrected, rows-corrected, rows-uncorrected,
 *                      rows-pending, rows-failed, pages-corrected, pages-uncorrected, pages-pending,
 *                      pcie-replays, nvlink-sent-kib, nvlink-received-kib; memory-temperature
 *                      (degrees); recovery-action: what it needs to recover;
 *                      addressing-mode: how it sees the host's memory; pcie-sent-kb,
 *                      pcie-received-kb (a second); memory-unrepairable, channel-repair and
 *                      tpc-repair, which it does not know without; gpm-METRIC, or of a GPU instance
 *                      gpm-METRIC-INSTANCE: percent or MiB/s (since Hopper);
 *                      fabric-state: NVML's number of its registration with an NVLink fabric,
 *                      which it has none without; fabric-status: an nvmlReturn_t;
 *                      fabric-cluster: the end of the cluster's UUID; fabric-clique;
 *                      fabric-health: NVML's summary; fabric-version: the newest structure
 *     nvml-nvlinks     INDEX OTHER LINKS
 *                      the number of NVLinks between two GPUs; "INDEX s LINKS" to a switch. Each
 *                      GPU numbers its links in the order of the lines
 *
 * The file nvml-compute-mode-UUID has a GPU's compute mode as one digit. The file
 * nvml-mig-mode-UUID has two digits: the current and the pending MIG mode.
 *
 * The MIG instances are the scenario's until one is created or destroyed. After that they are in
 * the file nvml-mig, a line for each entry of the tables below:
 *
 *     g INDEX PROFILE ID START             a GPU instance; "g -" for a free entry
 *     c GPU-INSTANCE ID SLICES START       a compute instance of that GPU instance; or "c -"
 *
 * As with the real driver, the kernel's list of capabilities and their nodes follow.
 *
 * Energy grows from boot by an idle GPU's power.
 *
 * To count queries, create the file nvml-inits in the state directory: each nvmlInit adds a byte.
 *
 * The library also runs in images with an older C library than the build machine's, and with musl.
 * So it uses no symbol newer than glibc 2.17 and none that musl lacks (hence system calls by their
 * numbers, and hand-written parsing). The loader of musl takes libc.so.6 for itself and ignores
 * versions of symbols, but there is no ld-linux.so: thread-local variables are reached through
 * descriptors and not through __tls_get_addr, which glibc has there (library.py, _FLAGS).
 *
 * The structures have the layouts that pynvml declares with ctypes, which the tests use. This is
 * one long file because it is one table of functions.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

#define API __attribute__((visibility("default")))
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    RESET_REQUIRED = 16,
    IN_USE = 19,
    INSUFFICIENT_RESOURCES = 23,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
} nvmlReturn_t;

enum { NVIDIA_MAJOR = 195, CONTROL_MINOR = 255, MOST_GPUS = 32, MOST_MIG = 7, MOST_LINKS = 36 };
enum { GEFORCE = 5, XID = 8, HOPPER = 9 };
enum { CURRENT, PENDING };

enum { INSTANCES_OF_GPU = 15, COMPUTE_OF_INSTANCE = 8, FIRST_CAPABILITY = 3, CONFIG_CAPABILITY = 1 };
enum { MOST_INSTANCES = MOST_GPUS * INSTANCES_OF_GPU };
enum { MOST_COMPUTE = MOST_INSTANCES * COMPUTE_OF_INSTANCE };

/* As statx(2); relative paths are not used. */
static int look_at(const char *path, unsigned mask, struct statx *status)
{
    return (int)syscall(SYS_statx, AT_FDCWD, path, 0, mask, status);
}

/* Files in the node's state directory describe the GPUs' activity. */
static const char *state_file(const char *name)
{
    static __thread char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", NODE_STATE, name);
    return path;
}

/* --- Handles --------------------------------------------------------------------------- */

/*
 * A device handle is the address of a struct gpu or of a struct mig in the tables; a handle of
 * a GPU instance or compute instance is the address of its struct. We compare callers' pointers
 * with the tables and never follow them, so a wrong one returns an error instead of crashing.
 */

static const struct gpu *visible[MOST_GPUS];
static u32 visible_count;
static const char *dev = "/dev";
static int initialised;
static char faults[4096];
static struct statx faults_seen;      /* the file of them, when it was read */
static __thread const char *function; /* the function that this thread is in */

/* The current instances; an entry without a profile or instance is free. */
static struct instance gpu_instances[MOST_INSTANCES];
static struct mig migs[MOST_COMPUTE];
static u32 instance_count, mig_count;

#define EACH_INSTANCE(i)                                                                           \
    for (struct instance *i = gpu_instances; i < gpu_instances + instance_count; i++)                     \
        if (i->profile)
#define EACH_MIG(mig)                                                                              \
    for (struct mig *mig = migs; mig < migs + mig_count; mig++)                                   \
        if (mig->instance)

/* A GPU's number in the scenario, which the files use. */
static u32 index_of(const struct gpu *gpu)
{
    return (u32)(gpu - GPUS);
}

static const struct gpu *as_gpu(const void *handle)
{
    for (u32 i = 0; i < visible_count; i++)
        if (handle == visible[i])
            return visible[i];
    return NULL;
}

static int is_node(u32 major_number, u32 minor_number, const char *format, ...)
{
    char path[PATH_MAX];
    struct statx status;
    int length = snprintf(path, sizeof path, "%s/", dev);
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(path + length, sizeof path - length, format, arguments);
    va_end(arguments);
    if (look_at(path, STATX_TYPE, &status) || !S_ISCHR(status.stx_mode))
        return 0;
    return status.stx_rdev_minor == minor_number &&
           (major_number == 0 || status.stx_rdev_major == major_number);
}

/* The mode now and after a reset, a digit each; the scenario's until one is set. */
static const char *mig_mode_file(const struct gpu *gpu)
{
    char name[128];

    snprintf(name, sizeof name, "nvml-mig-mode-%s", gpu->uuid);
    return state_file(name);
}

static u32 mig_mode_of(const struct gpu *gpu, int when)
{
    int descriptor = open(mig_mode_file(gpu), O_RDONLY | O_CLOEXEC);
    char modes[2];
    ssize_t length;

    if (descriptor < 0)
        return (u32)gpu->mig_mode;
    length = read(descriptor, modes, sizeof modes);
    close(descriptor);
    return length == sizeof modes ? (u32)(modes[when] - '0') : (u32)gpu->mig_mode;
}

static int mig_visible(const struct mig *mig)
{
    return as_gpu(mig->instance->gpu) &&
           is_node(0, mig->instance->capability, "nvidia-caps/nvidia-cap%u",
                   mig->instance->capability) &&
           is_node(0, mig->capability, "nvidia-caps/nvidia-cap%u", mig->capability);
}

static const struct mig *as_mig(const void *handle)
{
    EACH_MIG(mig)
        if (handle == mig && mig_visible(mig))
            return mig;
    return NULL;
}

static const struct instance *as_instance(const void *handle)
{
    EACH_INSTANCE(i)
        if (handle == i && as_gpu(i->gpu))
            return i;
    return NULL;
}

/* The GPU of a device handle, also of a MIG device's. */
static const struct gpu *board_of(const void *handle)
{
    const struct mig *mig = as_mig(handle);

    return mig ? mig->instance->gpu : as_gpu(handle);
}

static const struct mig *nth_mig(const struct gpu *gpu, u32 n)
{
    EACH_MIG(mig)
        if (mig->instance->gpu == gpu && mig_visible(mig) && n-- == 0)
            return mig;
    return NULL;
}

static nvmlReturn_t text(char *to, u32 size, const char *from)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (strlen(from) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* --- Faults ---------------------------------------------------------------------------- */

static void look_at_faults(struct statx *status)
{
    if (look_at(state_file("nvml-faults"), STATX_MTIME | STATX_SIZE | STATX_INO, status))
        memset(status, 0, sizeof *status);
}

static int differs(const struct statx *now, const struct statx *seen)
{
    return now->stx_ino != seen->stx_ino || now->stx_size != seen->stx_size ||
           now->stx_mtime.tv_sec != seen->stx_mtime.tv_sec ||
           now->stx_mtime.tv_nsec != seen->stx_mtime.tv_nsec;
}

static int faults_changed(void)
{
    struct statx now;

    look_at_faults(&now);
    return differs(&now, &faults_seen);
}

static void read_faults(void)
{
    const char *variable = getenv("NVSHIM_SIMULATED_FAULTS");
    char file[2048] = "", *comment;
    int descriptor;

    look_at_faults(&faults_seen);
    descriptor = open(state_file("nvml-faults"), O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
        ssize_t length = read(descriptor, file, sizeof file - 1);

        file[length > 0 ? length : 0] = '\0';
        close(descriptor);
    }
    for (comment = file; (comment = strchr(comment, '#')) != NULL;)
        while (*comment && *comment != '\n')
            *comment++ = ' ';
    snprintf(faults, sizeof faults, " %s\n%s ", variable ? variable : "", file);
    for (char *c = faults; *c; c++)
        if (*c == '\n' || *c == '\t' || *c == '\r')
            *c = ' ';
}

/* The text after " NAME=" in the faults, NAME without its version; or NULL. */
static const char *fault_of(const char *name)
{
    size_t length = strlen(name);
    const char *found = faults;

    if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v')
        length -= 3;
    while ((found = strchr(found, ' ')) != NULL) {
        found++;
        if (!strncmp(found, name, length) && found[length] == '=')
            return found + length + 1;
    }
    return NULL;
}

static u64 number(const char **from)
{
    u64 value = 0;

    while (**from == ' ' || **from == ':')
        (*from)++;
    while (**from >= '0' && **from <= '9')
        value = value * 10 + (*(*from)++ - '0');
    return value;
}

static void sleep_ms(u64 ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    while (nanosleep(&left, &left))
        ;
}

/* Perform the fault of this name; return what the function has to return. */
static nvmlReturn_t suffer(const char *name)
{
    const char *fault = fault_of(name);

    if (!fault)
        return SUCCESS;
    if (!strncmp(fault, "hang", 4))
        for (;;)
            pause();
    if (!strncmp(fault, "crash", 5))
        raise(SIGSEGV);
    if (!strncmp(fault, "sleep:", 6)) {
        fault += 6;
        sleep_ms(number(&fault));
    }
    if (!strncmp(fault, "error:", 6)) {
        fault += 6;
        return (nvmlReturn_t)number(&fault);
    }
    return SUCCESS;
}

/* --- MIG instances ---------------------------------------------------------------------- */

static struct statx mig_seen; /* the file of them, when it was read */

/* The kernel's numbers of capabilities are fixed (capabilities.py). */
static u32 capability_of(const struct gpu *gpu, u32 instance, u32 compute)
{
    u32 first = FIRST_CAPABILITY +
                (gpu->minor * INSTANCES_OF_GPU + instance) * (1 + COMPUTE_OF_INSTANCE);

    return first + compute;
}

static void put_instance(struct instance *at, const struct gpu *gpu, u32 profile, u32 id, u32 start)
{
    const struct profile *found = gpu->profiles;

    while (found->name && found->id != profile)
        found++;
    *at = (struct instance){gpu, found->name ? found : NULL, id, start, capability_of(gpu, id, 0)};
}

/* A compute instance of the scenario keeps its UUID when it is created again, as on a real GPU. */
static void put_mig(struct mig *at, const struct instance *instance, u32 id, u32 slices, u32 start)
{
    const struct gpu *gpu = instance->gpu;
    static char uuids[MOST_COMPUTE][48], names[MOST_COMPUTE][64];
    char *uuid = uuids[at - migs], *name = names[at - migs];
    u64 hash = 14695981039346656037ULL;

    for (const struct mig *mig = MIG; mig < MIG + MIG_COUNT; mig++)
        if (mig->instance->gpu == gpu && mig->instance->id == instance->id && mig->id == id)
            uuid = (char *)mig->uuid;
    if (uuid == uuids[at - migs]) {
        for (const char *c = gpu->uuid; *c; c++)
            hash = (hash ^ (u64)*c) * 1099511628211ULL;
        snprintf(uuid, sizeof uuids[0], "MIG-%08x-%04x-5000-8000-%04x%04x%04x", (u32)(hash >> 32),
                 (u32)(hash >> 16) & 0xffff, (u32)hash & 0xffff, instance->id, id);
    }
    if (slices == instance->profile->slices)
        snprintf(name, sizeof names[0], "%s", instance->profile->name);
    else
        snprintf(name, sizeof names[0], "%uc.%s", slices, instance->profile->name);
    *at = (struct mig){instance, uuid, name, id, slices, start,
                       capability_of(gpu, instance->id, 1 + id)};
}

static void load_scenario(void)
{
    instance_count = mig_count = 0;
    for (const struct instance *i = INSTANCES; i < INSTANCES + INSTANCE_COUNT; i++)
        put_instance(&gpu_instances[instance_count++], i->gpu, i->profile->id, i->id, i->start);
    for (const struct mig *mig = MIG; mig < MIG + MIG_COUNT; mig++)
        put_mig(&migs[mig_count++], &gpu_instances[mig->instance - INSTANCES], mig->id, mig->slices,
                mig->start);
}

static void load_lines(FILE *file)
{
    u32 places = 0, computes = 0;
    char line[128];

    while (fgets(line, sizeof line, file)) {
        const char *rest = line + 1;
        u32 first = (u32)number(&rest), second = (u32)number(&rest);
        u32 third = (u32)number(&rest), fourth = (u32)number(&rest);
        int is_free = line[2] == '-';

        if (line[0] == 'g' && places < MOST_INSTANCES) {
            if (is_free || first >= GPU_COUNT)
                gpu_instances[places] = (struct instance){0};
            else
                put_instance(&gpu_instances[places], &GPUS[first], second, third, fourth);
            places++;
        }
        if (line[0] == 'c' && computes < MOST_COMPUTE) {
            if (is_free || first >= places || !gpu_instances[first].profile)
                migs[computes] = (struct mig){0};
            else
                put_mig(&migs[computes], &gpu_instances[first], second, third, fourth);
            computes++;
        }
    }
    instance_count = places;
    mig_count = computes;
}

static void look_at_mig(void)
{
    static int is_loaded;
    struct statx now;
    FILE *file;

    if (look_at(state_file("nvml-mig"), STATX_MTIME | STATX_SIZE | STATX_INO, &now))
        memset(&now, 0, sizeof now);
    if (is_loaded && !differs(&now, &mig_seen))
        return;
    is_loaded = 1;
    mig_seen = now;
    file = fopen(state_file("nvml-mig"), "re");
    if (!file) {
        load_scenario();
        return;
    }
    load_lines(file);
    fclose(file);
}

static nvmlReturn_t enter(const char *name)
{
    nvmlReturn_t fault;

    function = name;
    if (!initialised)
        return UNINITIALIZED;
    if (faults_changed())
        read_faults();
    look_at_mig();
    fault = suffer("any");
    return fault ? fault : suffer(name);
}

/* Perform the faults of a GPU, and of this function on it. */
static nvmlReturn_t suffer_of(const struct gpu *gpu)
{
    char name[128];
    int length = snprintf(name, sizeof name, "gpu%u", index_of(gpu));
    nvmlReturn_t fault = suffer(name);

    if (fault)
        return fault;
    snprintf(name + length, sizeof name - length, ".%s", function);
    return suffer(name);
}

/* The start of every function that needs nvmlInit; then its required arguments. */
#define ENTER                                                                                      \
    do {                                                                                           \
        nvmlReturn_t entered = enter(__func__);                                                    \
        if (entered)                                                                               \
            return entered;                                                                        \
    } while (0)
#define REQUIRE(condition, otherwise)                                                              \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return otherwise;                                                                      \
    } while (0)
#define WELL(gpu)                                                                                  \
    do {                                                                                           \
        nvmlReturn_t ailing = suffer_of(gpu);                                                      \
        if (ailing)                                                                                \
            return ailing;                                                                         \
    } while (0)
#define GPU_OF(handle)                                                                             \
    const struct gpu *gpu = as_gpu(handle);                                                        \
    REQUIRE(gpu, as_mig(handle) ? NOT_SUPPORTED : INVALID_ARGUMENT);                               \
    WELL(gpu)
#define MIG_OF(handle)                                                                             \
    const struct mig *mig = as_mig(handle);                                                        \
    REQUIRE(mig, INVALID_ARGUMENT)
#define BOARD_OF(handle)                                                                           \
    const struct gpu *gpu = board_of(handle);                                                      \
    REQUIRE(gpu, INVALID_ARGUMENT);                                                                \
    WELL(gpu)

/* The start of most functions: check the device and the pointer for the result. */
#define EXPECT(answerable)                                                                         \
    ENTER;                                                                                         \
    REQUIRE(answerable, INVALID_ARGUMENT)
#define EXPECT_OF(whom, answerable)                                                                \
    ENTER;                                                                                         \
    whom;                                                                                          \
    REQUIRE(answerable, INVALID_ARGUMENT)

/* Another name of the same function; the second ignores the first one's extra arguments. */
#define ALIAS(name, of) API __typeof__(of) name __attribute__((alias(#of)));

/* Append one byte to the file of that name, if it exists. */
static void count_init(void)
{
    int descriptor = open(state_file("nvml-inits"), O_WRONLY | O_APPEND | O_CLOEXEC);

    if (descriptor < 0)
        return;
    if (write(descriptor, ".", 1) < 0)
        perror("nvml-inits");
    close(descriptor);
}

/* --- The library ----------------------------------------------------------------------- */

API nvmlReturn_t nvmlInitWithFlags(u32 flags)
{
    struct statx status;
    nvmlReturn_t fault;

    (void)flags;
    read_faults();
    count_init();
    fault = suffer("any");
    REQUIRE(!fault, fault);
    fault = suffer("nvmlInit");
    REQUIRE(!fault, fault);
    dev = look_at(NODE_DEV, STATX_TYPE, &status) ? "/dev" : NODE_DEV;
    REQUIRE(is_node(NVIDIA_MAJOR, CONTROL_MINOR, "nvidiactl"), DRIVER_NOT_LOADED);
    visible_count = 0;
    for (u32 i = 0; i < GPU_COUNT; i++)
        if (is_node(NVIDIA_MAJOR, GPUS[i].minor, "nvidia%u", GPUS[i].minor))
            visible[visible_count++] = &GPUS[i];
    initialised++;
    return SUCCESS;
}

ALIAS(nvmlInit_v2, nvmlInitWithFlags)
ALIAS(nvmlInit, nvmlInitWithFlags)

API nvmlReturn_t nvmlShutdown(void)
{
    ENTER;
    initialised--;
    return SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const words[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch",
        "In use by another client", "Insufficient Memory", "No data",
        [ARGUMENT_VERSION_MISMATCH] = "Argument version mismatch",
    };

    return (u32)result < COUNT(words) && words[result] ? words[result] : "Unknown Error";
}

struct pci_address {
    u32 domain, bus, device, function;
};

/* Read a hexadecimal number and move past it; return whether there is one. */
static int hexadecimal(const char **from, u32 *value)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    const char *start = *from, *digit;

    *value = 0;
    for (; **from && (digit = strchr(digits, **from)) != NULL; (*from)++)
        *value = *value << 4 | (u32)(digit - digits < 16 ? digit - digits : digit - digits - 6);
    return *from > start;
}

/* The forms of a PCI address that NVML accepts: [domain:]bus:device[.function], in hexadecimal. */
static int parse_address(const char *text, struct pci_address *at)
{
    const char *colon = strchr(text, ':');

    *at = (struct pci_address){0};
    if (colon && strchr(colon + 1, ':') && !(hexadecimal(&text, &at->domain) && *text++ == ':'))
        return 0;
    if (!hexadecimal(&text, &at->bus) || *text++ != ':' || !hexadecimal(&text, &at->device))
        return 0;
    if (*text == '.' && !(text++, hexadecimal(&text, &at->function)))
        return 0;
    return !*text;
}

/*
 * nvidia-smi gets tables of internal functions by UUID: a size in bytes, then pointers. It works
 * without nearly all of them, so they return "not supported". Two are needed for a PCI address
 * after -i: the one that parses an address, and the one that returns a GPU's.
 */
static nvmlReturn_t internal(void)
{
    return NOT_SUPPORTED;
}

static nvmlReturn_t internal_read_address(const char *text, u32 *domain, u32 *bus, u32 *device,
                                          u32 *function_number)
{
    struct pci_address at;

    REQUIRE(parse_address(text, &at), INVALID_ARGUMENT);
    *domain = at.domain, *bus = at.bus, *device = at.device, *function_number = at.function;
    return SUCCESS;
}

static nvmlReturn_t internal_address_of(u32 index, u32 *domain, u32 *bus, u32 *device)
{
    REQUIRE(index < visible_count, INVALID_ARGUMENT);
    *domain = visible[index]->domain, *bus = visible[index]->bus;
    *device = visible[index]->device;
    return SUCCESS;
}

API nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *uuid)
{
    enum { READ_ADDRESS = 12, ADDRESS_OF = 75 };
    static const unsigned char of_addresses[16] = {
        0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
    };
    static void *entries[2][256];
    int has_addresses;

    REQUIRE(table && uuid, INVALID_ARGUMENT);
    has_addresses = !memcmp(uuid, of_addresses, sizeof of_addresses);
    for (u32 i = 1; i < COUNT(entries[0]); i++)
        entries[has_addresses][i] = (void *)internal;
    entries[has_addresses][0] = (void *)sizeof entries[0];
    if (has_addresses) {
        entries[1][READ_ADDRESS] = (void *)internal_read_address;
        entries[1][ADDRESS_OF] = (void *)internal_address_of;
    }
    *table = entries[has_addresses];
    return SUCCESS;
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, u32 length)
{
    const char *lie;
    char said[80];

    ENTER;
    snprintf(said, sizeof said, "%s", DRIVER_VERSION);
    lie = fault_of("driver");
    if (lie)
        snprintf(said, sizeof said, "%.*s", (int)strcspn(lie, " "), lie);
    return text(version, length, said);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, u32 length)
{
    ENTER;
    return text(version, length, NVML_VERSION);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    EXPECT(version);
    *version = CUDA_VERSION;
    return SUCCESS;
}

ALIAS(nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetCudaDriverVersion)

API nvmlReturn_t nvmlSystemGetProcessName(u32 pid, char *name, u32 length)
{
    (void)pid, (void)name, (void)length;
    ENTER;
    return NOT_FOUND;
}

API nvmlReturn_t nvmlSystemGetHicVersion(u32 *count, void *entries)
{
    (void)entries;
    EXPECT(count);
    *count = 0;
    return SUCCESS;
}

ALIAS(nvmlUnitGetCount, nvmlSystemGetHicVersion)
ALIAS(nvmlGetExcludedDeviceCount, nvmlSystemGetHicVersion)

/* --- The GPUs' activity, from files -------------------------------------------------- */

/* A file's content, which the caller frees; NULL if it does not exist. */
static char *content_of(const char *path)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0, room = 0;
    char *content = NULL;
    ssize_t got = 1;

    if (descriptor < 0)
        return NULL;
    while (got > 0) {
        if (room - length < 2) {
            char *larger = realloc(content, room += 16384);

            if (!larger)
                break;
            content = larger;
        }
        got = read(descriptor, content + length, room - length - 1);
        length += got > 0 ? got : 0;
    }
    close(descriptor);
    if (content)
        content[length] = '\0';
    return content;
}

/* The start of the next line. */
static const char *after_line(const char *at)
{
    at += strcspn(at, "\n");
    return *at ? at + 1 : at;
}

/* The numbers in the rest of a line. */
static u32 numbers(const char *at, u64 *values, u32 most)
{
    u32 count = 0;

    for (; count < most; count++) {
        at += strspn(at, " \t");
        if (*at < '0' || *at > '9')
            break;
        values[count] = number(&at);
    }
    return count;
}

/* A GPU's value in the file of facts; the last line counts. */
static u64 fact(const struct gpu *gpu, const char *name, u64 otherwise)
{
    char *facts = content_of(state_file("nvml-facts"));
    size_t length = strlen(name);

    for (const char *line = facts; line && *line; line = after_line(line)) {
        const char *at = line;
        u64 index = number(&at);

        if (at == line || index != index_of(gpu))
            continue;
        at += strspn(at, " \t");
        if (strncmp(at, name, length) || at[length] != ' ')
            continue;
        at += length;
        otherwise = number(&at);
    }
    free(facts);
    return otherwise;
}

enum { NO_INSTANCE = 0xffffffff };
enum use { SM, MEMORY, ENCODER, DECODER, USES };

struct process {
    char kind; /* c, g or m */
    u32 pid, instance, compute;
    u64 bytes;
    u32 use[USES];
};

/* Call this for each process of a GPU or, if mig is given, of that device. */
static void each_process(const struct gpu *gpu, const struct mig *mig,
                         void (*what)(const struct process *, void *), void *data)
{
    char *processes = content_of(state_file("nvml-processes"));

    for (const char *line = processes; line && *line; line = after_line(line)) {
        struct process process = {.kind = 'c', .instance = NO_INSTANCE, .compute = NO_INSTANCE};
        u64 values[9];
        u32 count, at = 3;

        if (*line == 'g' || *line == 'm' || *line == 'c')
            process.kind = *line++;
        count = numbers(line, values, COUNT(values));
        if (count < 3 || values[0] != index_of(gpu))
            continue;
        process.pid = (u32)values[1];
        process.bytes = values[2];
        if (count == 5 || count == 9) {
            process.instance = (u32)values[at++];
            process.compute = (u32)values[at++];
        }
        for (u32 use = 0; use < USES && at < count; use++)
            process.use[use] = (u32)values[at++];
        if (!mig || (process.instance == mig->instance->id && process.compute == mig->id))
            what(&process, data);
    }
    free(processes);
}

static void add_bytes(const struct process *process, void *sum)
{
    *(u64 *)sum += process->bytes;
}

static u64 bytes_used(const struct gpu *gpu, const struct mig *mig)
{
    u64 sum = 0;

    each_process(gpu, mig, add_bytes, &sum);
    return sum;
}

static void add_use(const struct process *process, void *sums)
{
    for (u32 use = 0; use < USES; use++)
        ((u32 *)sums)[use] += process->use[use];
}

/* How busy a part of a GPU is, in percent. */
static u32 percent_of(const struct gpu *gpu, enum use use)
{
    static const char *const names[] = {"gpu", "memory", "encoder", "decoder"};
    u32 sums[USES] = {0};

    each_process(gpu, NULL, add_use, sums);
    return (u32)fact(gpu, names[use], sums[use] < 100 ? sums[use] : 100);
}

/* A tenth of the power limit while idle, and the rest in proportion to the load. */
static u32 milliwatts_of(const struct gpu *gpu)
{
    u32 idle = gpu->milliwatts / 10;

    return (u32)fact(gpu, "milliwatts", idle + (gpu->milliwatts - idle) / 100 *
                                                   (u64)percent_of(gpu, SM));
}

/* --- Finding devices ------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetCount_v2(u32 *count)
{
    const char *lie;

    EXPECT(count);
    lie = fault_of("count");
    *count = lie ? (u32)number(&lie) : visible_count;
    return SUCCESS;
}

ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(u32 index, const void **device)
{
    EXPECT(device && index < visible_count);
    WELL(visible[index]);
    *device = visible[index];
    return SUCCESS;
}

ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, const void **device)
{
    EXPECT(device && uuid);
    for (u32 i = 0; i < visible_count; i++) {
        if (!strcmp(uuid, visible[i]->uuid)) {
            *device = visible[i];
            return SUCCESS;
        }
    }
    EACH_MIG(mig) {
        if (!strcmp(uuid, mig->uuid) && mig_visible(mig)) {
            *device = mig;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, const void **device)
{
    EXPECT(device && serial);
    for (u32 i = 0; i < visible_count; i++) {
        if (!strcmp(serial, visible[i]->serial)) {
            *device = visible[i];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, const void **device)
{
    struct pci_address at;

    EXPECT(device && address);
    REQUIRE(parse_address(address, &at), INVALID_ARGUMENT);
    for (u32 i = 0; i < visible_count; i++) {
        const struct gpu *gpu = visible[i];

        if (at.domain == gpu->domain && at.bus == gpu->bus && at.device == gpu->device &&
            at.function == 0) {
            *device = gpu;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2)

/* --- A device's identity --------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetName(const void *device, char *name, u32 length)
{
    const struct mig *mig = as_mig(device);
    char full[96];

    ENTER;
    BOARD_OF(device);
    if (!mig)
        return text(name, length, gpu->name);
    snprintf(full, sizeof full, "%s MIG %s", gpu->name, mig->name);
    return text(name, length, full);
}

API nvmlReturn_t nvmlDeviceGetUUID(const void *device, char *uuid, u32 length)
{
    const struct mig *mig = as_mig(device);

    ENTER;
    BOARD_OF(device);
    return text(uuid, length, mig ? mig->uuid : gpu->uuid);
}

API nvmlReturn_t nvmlDeviceGetIndex(const void *device, u32 *index)
{
    const struct mig *mig = as_mig(device);

    EXPECT_OF(BOARD_OF(device), index);
    *index = 0;
    while (mig ? nth_mig(gpu, *index) != mig : visible[*index] != gpu)
        ++*index;
    return SUCCESS;
}

struct pci_v1 {
    char bus_id[16];
    u32 domain, bus, device, pci_device;
};

struct pci_v2 {
    struct pci_v1 v1;
    u32 pci_subsystem, reserved[4];
};

struct pci_v3 {
    struct pci_v1 v1;
    u32 pci_subsystem;
    char bus_id[32];
};

struct pci_ext {
    u32 version, domain, bus, device, pci_device, pci_subsystem, base_class, sub_class;
    char bus_id[32];
};

/* A device's PCI address; all versions of the structure start the same way. */
static struct pci_v3 pci_at(u32 domain, u32 bus, u32 device)
{
    struct pci_v3 info = {.v1 = {.domain = domain, .bus = bus, .device = device}};

    snprintf(info.v1.bus_id, sizeof info.v1.bus_id, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff,
             device & 0xff);
    snprintf(info.bus_id, sizeof info.bus_id, "%08X:%02X:%02X.0", domain, bus, device);
    return info;
}

static struct pci_v3 pci_of(const struct gpu *gpu)
{
    struct pci_v3 info = pci_at(gpu->domain, gpu->bus, gpu->device);

    info.v1.pci_device = gpu->pci_device;
    info.pci_subsystem = gpu->pci_subsystem;
    return info;
}

API nvmlReturn_t nvmlDeviceGetPciInfo(const void *device, struct pci_v1 *info)
{
    EXPECT_OF(BOARD_OF(device), info);
    *info = pci_of(gpu).v1;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v2(const void *device, struct pci_v2 *info)
{
    EXPECT_OF(BOARD_OF(device), info);
    *info = (struct pci_v2){.v1 = pci_of(gpu).v1, .pci_subsystem = gpu->pci_subsystem};
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(const void *device, struct pci_v3 *info)
{
    EXPECT_OF(BOARD_OF(device), info);
    *info = pci_of(gpu);
    return SUCCESS;
}

/* nvidia-smi asks this one since branch 550. The class is that of a 3D controller. */
API nvmlReturn_t nvmlDeviceGetPciInfoExt(const void *device, struct pci_ext *info)
{
    struct pci_v3 pci;

    EXPECT_OF(BOARD_OF(device), info);
    REQUIRE(info->version == (sizeof *info | 1 << 24), ARGUMENT_VERSION_MISMATCH);
    pci = pci_of(gpu);
    *info = (struct pci_ext){info->version, pci.v1.domain, pci.v1.bus, pci.v1.device,
                             pci.v1.pci_device, pci.pci_subsystem, 3, 2, {0}};
    strcpy(info->bus_id, pci.bus_id);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(const void *device, char *version)
{
    ENTER;
    BOARD_OF(device);
    return text(version, 64, DRIVER_VERSION);
}

/* --- Compute mode: it persists until the node is removed ---------------------------------- */

static const char *compute_mode_file(const struct gpu *gpu)
{
    char name[128];

    snprintf(name, sizeof name, "nvml-compute-mode-%s", gpu->uuid);
    return state_file(name);
}

static u32 compute_mode_of(const struct gpu *gpu)
{
    int descriptor = open(compute_mode_file(gpu), O_RDONLY | O_CLOEXEC);
    char mode = '0';

    if (descriptor < 0)
        return 0;
    if (read(descriptor, &mode, 1) < 0)
        perror("nvml-compute-mode");
    close(descriptor);
    return mode - '0';
}

API nvmlReturn_t nvmlDeviceSetComputeMode(const void *device, u32 mode)
{
    int descriptor;
    char digit = '0' + mode;
    nvmlReturn_t result = SUCCESS;

    EXPECT_OF(GPU_OF(device), mode <= 3);
    descriptor = open(compute_mode_file(gpu), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    REQUIRE(descriptor >= 0, NO_PERMISSION);
    if (write(descriptor, &digit, 1) != 1)
        result = UNKNOWN;
    close(descriptor);
    return result;
}

/*
 * Functions that return one number. They are a table, because they differ only in the name and
 * the number.
 */
#define NUMBER_OF(type, name, of, value)                                                           \
    API nvmlReturn_t name(const void *device, type *number)                                        \
    {                                                                                              \
        EXPECT_OF(of(device), number);                                                             \
        *number = (value);                                                                         \
        return SUCCESS;                                                                            \
    }
#define NUMBER(name, of, value) NUMBER_OF(u32, name, of, value)
#define NUMBER64(name, of, value) NUMBER_OF(u64, name, of, value)

/* The same for two numbers, and for texts. */
#define PAIR(name, of, value, other)                                                               \
    API nvmlReturn_t name(const void *device, u32 *one, u32 *two)                                  \
    {                                                                                              \
        EXPECT_OF(of(device), one && two);                                                         \
        *one = (value);                                                                            \
        *two = (other);                                                                            \
        return SUCCESS;                                                                            \
    }
#define TEXT(name, of, value)                                                                      \
    API nvmlReturn_t name(const void *device, char *to, u32 length)                                \
    {                                                                                              \
        ENTER;                                                                                     \
        of(device);                                                                                \
        return text(to, length, value);                                                            \
    }

TEXT(nvmlDeviceGetSerial, GPU_OF, gpu->serial)
TEXT(nvmlDeviceGetVbiosVersion, BOARD_OF, gpu->vbios)
PAIR(nvmlDeviceGetCudaComputeCapability, BOARD_OF, gpu->major, gpu->minor_capability)
PAIR(nvmlDeviceGetGspFirmwareMode, BOARD_OF, 1, 1)
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, GPU_OF, gpu->milliwatts / 2, gpu->milliwatts)
/* ECC is on, except on gaming GPUs. */
PAIR(nvmlDeviceGetEccMode, GPU_OF, gpu->brand != GEFORCE, gpu->brand != GEFORCE)
NUMBER64(nvmlDeviceGetSupportedClocksThrottleReasons, GPU_OF, 0x1ff)
/* ECC single, ECC double, P-state, Xid, clock; GPU unavailable and recovery action since 580. */
NUMBER64(nvmlDeviceGetSupportedEventTypes, GPU_OF,
         1 | 2 | 4 | XID | 16 | (atoi(DRIVER_VERSION) >= 580 ? 0x4000 | 0x8000 : 0))
/* 1: idle. */
NUMBER64(nvmlDeviceGetCurrentClocksThrottleReasons, GPU_OF,
         fact(gpu, "throttle", percent_of(gpu, SM) == 0))
ALIAS(nvmlDeviceGetCurrentClocksEventReasons, nvmlDeviceGetCurrentClocksThrottleReasons)
NUMBER(nvmlDeviceGetMinorNumber, GPU_OF, gpu->minor)
NUMBER(nvmlDeviceGetArchitecture, BOARD_OF, gpu->architecture)
NUMBER(nvmlDeviceGetBrand, BOARD_OF, gpu->brand)
NUMBER(nvmlDeviceGetNumGpuCores, BOARD_OF, gpu->cores)
NUMBER(nvmlDeviceGetBoardId, BOARD_OF, gpu->bus << 8)
NUMBER(nvmlDeviceGetMultiGpuBoard, BOARD_OF, 0)
NUMBER(nvmlDeviceGetBusType, BOARD_OF, 2) /* PCIe */
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, GPU_OF, gpu->pcie_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, GPU_OF, gpu->pcie_generation)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, GPU_OF, gpu->pcie_generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, GPU_OF, gpu->pcie_lanes)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, GPU_OF, gpu->pcie_lanes)
NUMBER(nvmlDeviceGetPcieReplayCounter, GPU_OF, 0)
NUMBER(nvmlDeviceGetPersistenceMode, BOARD_OF, 0)
NUMBER(nvmlDeviceGetDisplayMode, BOARD_OF, 0)
NUMBER(nvmlDeviceGetDisplayActive, BOARD_OF, 0)
NUMBER(nvmlDeviceGetComputeMode, BOARD_OF, compute_mode_of(gpu))
NUMBER(nvmlDeviceGetAccountingMode, BOARD_OF, 0)
NUMBER(nvmlDeviceGetAccountingBufferSize, BOARD_OF, 4000)
NUMBER(nvmlDeviceGetVirtualizationMode, BOARD_OF, 0)
NUMBER(nvmlDeviceGetPowerManagementMode, GPU_OF, 1)
NUMBER(nvmlDeviceGetPowerUsage, GPU_OF, milliwatts_of(gpu))
NUMBER(nvmlDeviceGetPowerManagementLimit, GPU_OF, gpu->milliwatts)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, GPU_OF, gpu->milliwatts)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, GPU_OF, gpu->milliwatts)
NUMBER(nvmlDeviceGetPerformanceState, BOARD_OF, 0)
NUMBER(nvmlDeviceGetPowerState, BOARD_OF, 0)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, GPU_OF, 0)

API nvmlReturn_t nvmlDeviceGetTemperature(const void *device, u32 sensor, u32 *celsius)
{
    EXPECT_OF(GPU_OF(device), celsius && sensor == 0);
    *celsius = (u32)fact(gpu, "temperature", 30);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(const void *device, u32 threshold, u32 *celsius)
{
    static const u32 thresholds[] = {95, 92, 95, 87}; /* shutdown, slowdown, memory, GPU */

    EXPECT_OF(GPU_OF(device), celsius);
    REQUIRE(threshold < COUNT(thresholds), NOT_SUPPORTED);
    *celsius = thresholds[threshold];
    return SUCCESS;
}

/* Clocks: 0 graphics, 1 SM, 2 memory, 3 video. An idle GPU runs at the lowest. */
static nvmlReturn_t clock_of(const void *device, u32 type, u32 *mhz, int idle)
{
    GPU_OF(device);
    REQUIRE(mhz && type < 4, INVALID_ARGUMENT);
    *mhz = type == 2 ? gpu->memory_mhz : idle ? 345 : gpu->graphics_mhz;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetClockInfo(const void *device, u32 type, u32 *mhz)
{
    ENTER;
    return clock_of(device, type, mhz, 1);
}

API nvmlReturn_t nvmlDeviceGetMaxClockInfo(const void *device, u32 type, u32 *mhz)
{
    ENTER;
    return clock_of(device, type, mhz, 0);
}

API nvmlReturn_t nvmlDeviceGetClock(const void *device, u32 type, u32 id, u32 *mhz)
{
    ENTER;
    return clock_of(device, type, mhz, id == 0);
}

API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(const void *device, u64 *millijoules)
{
    struct timespec up;

    EXPECT_OF(GPU_OF(device), millijoules);
    clock_gettime(CLOCK_BOOTTIME, &up);
    *millijoules = (up.tv_sec * 1000ULL + up.tv_nsec / 1000000) * (gpu->milliwatts / 10) / 1000 +
                   fact(gpu, "millijoules", 0);
    return SUCCESS;
}

struct utilization {
    u32 gpu, memory;
};

API nvmlReturn_t nvmlDeviceGetUtilizationRates(const void *device, struct utilization *rates)
{
    EXPECT_OF(GPU_OF(device), rates);
    REQUIRE(!mig_mode_of(gpu, CURRENT), NOT_SUPPORTED);
    rates->gpu = percent_of(gpu, SM);
    rates->memory = percent_of(gpu, MEMORY);
    return SUCCESS;
}

/* Percentages, and periods in microseconds. */
PAIR(nvmlDeviceGetEncoderUtilization, GPU_OF, percent_of(gpu, ENCODER), 100000)
PAIR(nvmlDeviceGetDecoderUtilization, GPU_OF, percent_of(gpu, DECODER), 100000)
PAIR(nvmlDeviceGetJpgUtilization, GPU_OF, 0, 100000)
PAIR(nvmlDeviceGetOfaUtilization, GPU_OF, 0, 100000)

API nvmlReturn_t nvmlDeviceGetPcieThroughput(const void *device, u32 counter, u32 *kb_per_second)
{
    EXPECT_OF(GPU_OF(device), kb_per_second && counter < 2);
    *kb_per_second = (u32)fact(gpu, counter ? "pcie-received-kb" : "pcie-sent-kb", 0);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(const void *device, u32 type, u32 counter, u64 *count)
{
    EXPECT_OF(GPU_OF(device), count && type < 2 && counter < 2);
    REQUIRE(gpu->brand != GEFORCE, NOT_SUPPORTED);
    *count = fact(gpu, type ? "ecc-uncorrected" : "ecc-corrected", 0);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(const void *device, u32 type, u32 counter,
                                                 u32 location, u64 *count)
{
    (void)location;
    return nvmlDeviceGetTotalEccErrors(device, type, counter, count);
}

API nvmlReturn_t nvmlDeviceGetRemappedRows(const void *device, u32 *correctable, u32 *uncorrectable,
                                           u32 *pending, u32 *failed)
{
    EXPECT_OF(GPU_OF(device), correctable && uncorrectable && pending && failed);
    *correctable = (u32)fact(gpu, "rows-corrected", 0);
    *uncorrectable = (u32)fact(gpu, "rows-uncorrected", 0);
    *pending = (u32)fact(gpu, "rows-pending", 0);
    *failed = (u32)fact(gpu, "rows-failed", 0);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(const void *device, u32 *version_and_flag)
{
    u64 flag;

    EXPECT_OF(GPU_OF(device), version_and_flag);
    flag = fact(gpu, "memory-unrepairable", NO_INSTANCE);
    REQUIRE(flag != NO_INSTANCE, NOT_SUPPORTED);
    version_and_flag[1] = (u32)flag;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetRepairStatus(const void *device, u32 *version_and_pending)
{
    u64 channel;

    EXPECT_OF(GPU_OF(device), version_and_pending);
    channel = fact(gpu, "channel-repair", NO_INSTANCE);
    REQUIRE(channel != NO_INSTANCE, NOT_SUPPORTED);
    version_and_pending[1] = (u32)channel;
    version_and_pending[2] = (u32)fact(gpu, "tpc-repair", 0);
    return SUCCESS;
}

struct field_value {
    u32 id, scope;
    long long timestamp, latency;
    int type;
    nvmlReturn_t result;
    u64 value;
};

/* The fields with a value, their types (unsigned int and long long), and their facts. */
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, NO_FACT = -1, REMOTE_LINK = 146 };
static const struct {
    u32 id;
    int type;
    const char *fact;
    long long otherwise; /* without such a fact; NO_FACT: it is not supported then */
} fields_known[] = {
    {29, UNSIGNED_INT, "pages-corrected", NO_FACT},
    {30, UNSIGNED_INT, "pages-uncorrected", NO_FACT},
    {31, UNSIGNED_INT, "pages-pending", NO_FACT},
    {82, UNSIGNED_INT, "memory-temperature", 35},
    {94, UNSIGNED_INT, "pcie-replays", 0},
    {138, UNSIGNED_LONG_LONG, "nvlink-sent-kib", NO_FACT},
    {139, UNSIGNED_LONG_LONG, "nvlink-received-kib", NO_FACT},
    {REMOTE_LINK, UNSIGNED_INT, "", NO_FACT},
    {230, UNSIGNED_INT, "recovery-action", 0},
};

API nvmlReturn_t nvmlDeviceGetFieldValues(const void *device, int count, struct field_value *fields)
{
    int known = 0;

    EXPECT_OF(GPU_OF(device), fields && count > 0);
    for (int i = 0; i < count; i++) {
        fields[i].result = NOT_SUPPORTED;
        for (u32 k = 0; k < COUNT(fields_known); k++) {
            u64 value;

            if (fields[i].id != fields_known[k].id)
                continue;
            value = fact(gpu, fields_known[k].fact, (u64)fields_known[k].otherwise);
            /* A switch's ports are those of the first GPU's links, then of the next one's. */
            if (fields[i].id == REMOTE_LINK)
                value = index_of(gpu) * MOST_LINKS + fields[i].scope;
            if (value == (u64)NO_FACT)
                continue;
            fields[i].type = fields_known[k].type;
            fields[i].value = value;
            fields[i].result = SUCCESS;
            known = 1;
        }
    }
    return known ? SUCCESS : NOT_SUPPORTED;
}

/* Only drivers of branch 580 and later report it; here any does, if there is such a fact. */
API nvmlReturn_t nvmlDeviceGetAddressingMode(const void *device, u32 *version_and_mode)
{
    u64 mode;

    ENTER;
    GPU_OF(device);
    REQUIRE(version_and_mode, INVALID_ARGUMENT);
    mode = fact(gpu, "addressing-mode", NO_INSTANCE);
    REQUIRE(mode != NO_INSTANCE, NOT_SUPPORTED);
    version_and_mode[1] = (u32)mode;
    return SUCCESS;
}

/* --- The NVLink fabric ------------------------------------------------------------------- */

/* The second version begins with its number and lacks the summary; the first has no health. */
struct fabric {
    u32 version;
    unsigned char cluster[16];
    u32 status, clique;
    unsigned char state, unwritten[3];
    u32 health_mask;
    unsigned char summary;
};

static nvmlReturn_t fabric_of(const struct gpu *gpu, struct fabric *fabric)
{
    u64 state = fact(gpu, "fabric-state", NO_INSTANCE);
    u64 cluster = fact(gpu, "fabric-cluster", 0);

    REQUIRE(state != NO_INSTANCE, NOT_SUPPORTED);
    *fabric = (struct fabric){
        .status = (u32)fact(gpu, "fabric-status", 0),
        .clique = (u32)fact(gpu, "fabric-clique", 0),
        .state = (unsigned char)state,
        .unwritten = {0xa5, 0xa5, 0xa5},
        .summary = (unsigned char)fact(gpu, "fabric-health", 0),
    };
    for (u32 i = 0; i < sizeof cluster; i++)
        fabric->cluster[15 - i] = (unsigned char)(cluster >> 8 * i);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(const void *device, struct fabric *info)
{
    struct fabric fabric = {0};
    u32 version, size;
    nvmlReturn_t result;

    EXPECT_OF(GPU_OF(device), info);
    version = info->version >> 24;
    size = version == 2 ? offsetof(struct fabric, summary) : sizeof fabric;
    REQUIRE(version >= 2 && version <= fact(gpu, "fabric-version", 3), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(info->version == (size | version << 24), ARGUMENT_VERSION_MISMATCH);
    result = fabric_of(gpu, &fabric);
    REQUIRE(!result, result);
    fabric.version = info->version;
    memcpy(info, &fabric, size);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(const void *device, void *info)
{
    struct fabric fabric = {0};
    nvmlReturn_t result;

    EXPECT_OF(GPU_OF(device), info);
    result = fabric_of(gpu, &fabric);
    REQUIRE(!result, result);
    memcpy(info, fabric.cluster, offsetof(struct fabric, health_mask) - sizeof fabric.version);
    return SUCCESS;
}

/* --- Memory ---------------------------------------------------------------------------- */

struct memory {
    u64 total, free, used;
};

struct memory_v2 {
    u32 version;
    u64 total, reserved, free, used;
};

/* The driver's own memory: some of each GPU, a little of each MIG device. */
static nvmlReturn_t memory(const void *device, u64 *total, u64 *reserved, u64 *used)
{
    const struct mig *mig = as_mig(device);

    BOARD_OF(device);
    *total = (mig ? mig->instance->profile->memory_mib : gpu->memory_mib) << 20;
    *reserved = (mig ? 13ULL : 551ULL) << 20;
    *used = bytes_used(gpu, mig);
    if (*used > *total - *reserved)
        *used = *total - *reserved;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(const void *device, struct memory *info)
{
    u64 total, reserved, used;
    nvmlReturn_t result;

    EXPECT(info);
    result = memory(device, &total, &reserved, &used);
    REQUIRE(!result, result);
    used += reserved;
    *info = (struct memory){.total = total, .free = total - used, .used = used};
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(const void *device, struct memory_v2 *info)
{
    u64 total, reserved, used;
    nvmlReturn_t result;

    EXPECT(info);
    REQUIRE(info->version == (sizeof *info | 2 << 24), ARGUMENT_VERSION_MISMATCH);
    result = memory(device, &total, &reserved, &used);
    REQUIRE(!result, result);
    info->total = total;
    info->reserved = reserved;
    info->free = total - reserved - used;
    info->used = used;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(const void *device, struct memory *info)
{
    const u64 used = 1ULL << 20;
    u64 total = 1ULL << 20;

    EXPECT_OF(BOARD_OF(device), info);
    while (total < gpu->memory_mib << 20)
        total <<= 1;
    *info = (struct memory){.total = total, .free = total - used, .used = used};
    return SUCCESS;
}

/* --- Processes ------------------------------------------------------------------------- */

struct process_info {
    u32 pid;
    u64 bytes;
    u32 instance, compute; /* since _v2 */
};

/* The output array: processes of one kind, as many as fit. */
struct list {
    char kind;
    u32 room, count;
    size_t size; /* of an entry, by the version of the function */
    char *entries;
};

static void put_process(const struct process *process, void *data)
{
    struct list *list = data;
    struct process_info info = {
        .pid = process->pid,
        .bytes = process->bytes,
        .instance = process->instance,
        .compute = process->compute,
    };

    if (process->kind != list->kind)
        return;
    if (list->count < list->room)
        memcpy(list->entries + list->count * list->size, &info, list->size);
    list->count++;
}

/* Count is the size of the array, and on return the number of processes. */
static nvmlReturn_t list_processes(const void *device, struct list *list, u32 *count)
{
    BOARD_OF(device);
    REQUIRE(count, INVALID_ARGUMENT);
    list->room = list->entries ? *count : 0;
    each_process(gpu, as_mig(device), put_process, list);
    *count = list->count;
    return list->count > list->room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(name, of_kind, of_size)                                                          \
    API nvmlReturn_t name(const void *device, u32 *count, void *processes)                         \
    {                                                                                              \
        struct list list = {.kind = of_kind, .size = of_size, .entries = processes};               \
        ENTER;                                                                                     \
        return list_processes(device, &list, count);                                               \
    }

enum { FIRST = offsetof(struct process_info, instance), LATER = sizeof(struct process_info) };

PROCESSES(nvmlDeviceGetComputeRunningProcesses, 'c', FIRST)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 'c', LATER)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 'c', LATER)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 'g', FIRST)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 'g', LATER)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 'g', LATER)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, 'm', FIRST)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'm', LATER)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'm', LATER)

API nvmlReturn_t nvmlDeviceGetAccountingPids(const void *device, u32 *count, u32 *pids)
{
    (void)pids;
    EXPECT_OF(BOARD_OF(device), count);
    *count = 0;
    return SUCCESS;
}

struct process_use {
    u32 pid;
    u64 when; /* microseconds since the epoch */
    u32 use[USES];
};

struct uses {
    u32 room, count;
    struct process_use *entries;
};

static void put_use(const struct process *process, void *data)
{
    struct uses *uses = data;
    struct process_use entry = {.pid = process->pid};
    struct timespec now;

    if (!process->use[SM] && !process->use[MEMORY] && !process->use[ENCODER] &&
        !process->use[DECODER])
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    entry.when = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
    memcpy(entry.use, process->use, sizeof entry.use);
    if (uses->count < uses->room)
        uses->entries[uses->count] = entry;
    uses->count++;
}

/* One sample of each active process, always a new one. */
API nvmlReturn_t nvmlDeviceGetProcessUtilization(const void *device, struct process_use *samples,
                                                 u32 *count, u64 since)
{
    struct uses uses = {.entries = samples};

    (void)since;
    EXPECT_OF(GPU_OF(device), count);
    REQUIRE(!mig_mode_of(gpu, CURRENT), NOT_SUPPORTED);
    uses.room = samples ? *count : 0;
    each_process(gpu, NULL, put_use, &uses);
    *count = uses.count;
    REQUIRE(uses.count, NOT_FOUND);
    return uses.count > uses.room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* --- Topology --------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetMemoryAffinity(const void *device, u32 size, unsigned long *nodes,
                                             u32 scope)
{
    (void)scope;
    EXPECT_OF(GPU_OF(device), nodes && size);
    memset(nodes, 0, size * sizeof *nodes);
    nodes[0] = 1UL << gpu->numa_node;
    return SUCCESS;
}

/* All CPUs are local: the simulated sockets have none of their own. */
API nvmlReturn_t nvmlDeviceGetCpuAffinity(const void *device, u32 size, unsigned long *cpus)
{
    const u32 bits = 8 * sizeof *cpus;
    long online = sysconf(_SC_NPROCESSORS_ONLN);

    EXPECT_OF(GPU_OF(device), cpus && size);
    memset(cpus, 0, size * sizeof *cpus);
    for (u32 cpu = 0; cpu < online && cpu < size * bits; cpu++)
        cpus[cpu / bits] |= 1UL << cpu % bits;
    return SUCCESS;
}

/* Levels: 10 a switch between them, 40 the same socket, 50 across sockets. */
API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(const void *one, const void *other, u32 *level)
{
    const struct gpu *first = as_gpu(one), *second = as_gpu(other);

    EXPECT(first && second && level);
    *level = first == second ? 0 : first->numa_node == second->numa_node ? 40 : 50;
    return SUCCESS;
}

/* --- NVLink ---------------------------------------------------------------------------- */

enum { TO_SWITCH = -1, NO_LINK = -2, NVSWITCH_BUS = 0xc0 };

/* A link's remote end: the minor of the other GPU, or one of the above. */
static int link_to(const struct gpu *gpu, u32 link)
{
    char *links = content_of(state_file("nvml-nvlinks"));
    int found = NO_LINK;

    for (const char *line = links; line && *line && found == NO_LINK; line = after_line(line)) {
        const char *at = line;
        u64 one, other, count;
        int to_switch;

        one = number(&at);
        if (at == line)
            continue;
        at += strspn(at, " ");
        to_switch = *at == 's';
        at += to_switch;
        other = to_switch ? 0 : number(&at);
        count = number(&at);
        if (one != index_of(gpu) && (to_switch || other != index_of(gpu)))
            continue;
        if (link < count)
            found = to_switch ? TO_SWITCH : (int)(one == index_of(gpu) ? other : one);
        else
            link -= (u32)count;
    }
    free(links);
    return found;
}

#define LINK_OF(device, link)                                                                      \
    GPU_OF(device);                                                                                \
    int end;                                                                                       \
    REQUIRE((link) < MOST_LINKS, INVALID_ARGUMENT);                                                \
    end = link_to(gpu, link);                                                                      \
    REQUIRE(end != NO_LINK, NOT_SUPPORTED)

#define LINK_NUMBER(name, value)                                                                   \
    API nvmlReturn_t name(const void *device, u32 link, u32 *number)                               \
    {                                                                                              \
        ENTER;                                                                                     \
        LINK_OF(device, link);                                                                     \
        REQUIRE(number, INVALID_ARGUMENT);                                                         \
        *number = (value);                                                                         \
        return SUCCESS;                                                                            \
    }

LINK_NUMBER(nvmlDeviceGetNvLinkState, 1)
LINK_NUMBER(nvmlDeviceGetNvLinkVersion, gpu->major >= 9 ? 7 : 5)
/* 0 a GPU, 2 a switch. */
LINK_NUMBER(nvmlDeviceGetNvLinkRemoteDeviceType, end == TO_SWITCH ? 2 : 0)

API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(const void *device, u32 link,
                                                     struct pci_v3 *info)
{
    ENTER;
    LINK_OF(device, link);
    REQUIRE(info, INVALID_ARGUMENT);
    *info = pci_at(0, end == TO_SWITCH ? NVSWITCH_BUS + link % 4 : 0, 0);
    for (u32 i = 0; i < GPU_COUNT; i++)
        if ((int)i == end)
            *info = pci_of(&GPUS[i]);
    info->pci_subsystem = 0;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(const void *device, u32 link,
                                                  struct pci_v2 *info)
{
    struct pci_v3 full;
    nvmlReturn_t result;

    REQUIRE(info, INVALID_ARGUMENT);
    result = nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &full);
    REQUIRE(!result, result);
    memset(info, 0, sizeof *info);
    info->v1 = full.v1;
    return SUCCESS;
}

/* Capabilities 0 read, 1 write, 2 NVLink, 3 atomics, 4 PCIe: 0 means yes, 5 means no. */
API nvmlReturn_t nvmlDeviceGetP2PStatus(const void *one, const void *other, u32 capability,
                                        u32 *status)
{
    const struct gpu *second = as_gpu(other);
    int linked = 0;

    EXPECT_OF(GPU_OF(one), second && status && capability < 5);
    for (u32 link = 0; link < MOST_LINKS; link++) {
        int end = link_to(gpu, link);

        linked |= end == TO_SWITCH || end == (int)index_of(second);
    }
    *status = linked || capability < 2 ? 0 : 5;
    return SUCCESS;
}

/* --- GPM ------------------------------------------------------------------------------- */

struct gpm_sample {
    const struct gpu *gpu; /* NULL until it is filled */
    u32 instance;          /* NO_INSTANCE: the whole GPU */
    u64 milliseconds;
};

struct gpm_metric {
    u32 id;
    nvmlReturn_t result;
    double value;
    const char *short_name, *long_name, *unit;
};

struct gpm_request {
    u32 version, count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[];
};

enum { SM_UTIL = 2, FIRST_OF_GPU = 20, GPM_SHORTEST = 100 };

API nvmlReturn_t nvmlGpmQueryDeviceSupport(const void *device, u32 *version_and_support)
{
    EXPECT_OF(BOARD_OF(device), version_and_support && version_and_support[0] == 1);
    version_and_support[1] = gpu->major >= HOPPER;
    return SUCCESS;
}

API nvmlReturn_t nvmlGpmSampleAlloc(struct gpm_sample **sample)
{
    EXPECT(sample);
    *sample = calloc(1, sizeof **sample);
    return *sample ? SUCCESS : UNKNOWN;
}

API nvmlReturn_t nvmlGpmSampleFree(struct gpm_sample *sample)
{
    EXPECT(sample);
    free(sample);
    return SUCCESS;
}

static nvmlReturn_t fill_sample(const struct gpu *gpu, u32 instance, struct gpm_sample *sample)
{
    struct timespec now;

    REQUIRE(gpu->major >= HOPPER, NOT_SUPPORTED);
    clock_gettime(CLOCK_MONOTONIC, &now);
    *sample = (struct gpm_sample){gpu, instance, now.tv_sec * 1000ULL + now.tv_nsec / 1000000};
    return SUCCESS;
}

API nvmlReturn_t nvmlGpmSampleGet(const void *device, struct gpm_sample *sample)
{
    EXPECT_OF(GPU_OF(device), sample);
    return fill_sample(gpu, NO_INSTANCE, sample);
}

API nvmlReturn_t nvmlGpmMigSampleGet(const void *device, u32 instance, struct gpm_sample *sample)
{
    EXPECT_OF(GPU_OF(device), sample);
    EACH_INSTANCE(i)
        if (i->gpu == gpu && i->id == instance)
            return fill_sample(gpu, instance, sample);
    return NOT_FOUND;
}

/* Without a fact, the SMs' use for the first two metrics of a whole GPU, and 0 for the others. */
static void measure(const struct gpm_sample *sample, struct gpm_metric *metric)
{
    char name[64];
    int is_whole = sample->instance == NO_INSTANCE;
    u64 otherwise = is_whole && metric->id <= SM_UTIL ? percent_of(sample->gpu, SM) : 0;

    metric->result = is_whole || metric->id < FIRST_OF_GPU ? SUCCESS : NOT_SUPPORTED;
    snprintf(name, sizeof name, is_whole ? "gpm-%u" : "gpm-%u-%u", metric->id, sample->instance);
    metric->value = (double)fact(sample->gpu, name, otherwise);
}

API nvmlReturn_t nvmlGpmMetricsGet(struct gpm_request *request)
{
    const struct gpm_sample *first, *second;

    EXPECT(request);
    REQUIRE(request->version == 1, ARGUMENT_VERSION_MISMATCH);
    first = request->first;
    second = request->second;
    REQUIRE(first && second && first->gpu && first->gpu == second->gpu, INVALID_ARGUMENT);
    REQUIRE(first->instance == second->instance, INVALID_ARGUMENT);
    REQUIRE(second->milliseconds >= first->milliseconds + GPM_SHORTEST, INVALID_ARGUMENT);
    for (u32 i = 0; i < request->count; i++)
        measure(second, &request->metrics[i]);
    return SUCCESS;
}

/* --- MIG ------------------------------------------------------------------------------- */

static void count_process(const struct process *process, void *count)
{
    (void)process;
    ++*(u32 *)count;
}

API nvmlReturn_t nvmlDeviceGetMigMode(const void *device, u32 *current, u32 *pending)
{
    EXPECT_OF(GPU_OF(device), current && pending);
    REQUIRE(gpu->mig_capable, NOT_SUPPORTED);
    *current = mig_mode_of(gpu, CURRENT);
    *pending = mig_mode_of(gpu, PENDING);
    return SUCCESS;
}

/* Before Hopper it is pending until a reset, and no process may use the GPU. */
API nvmlReturn_t nvmlDeviceSetMigMode(const void *device, u32 mode, nvmlReturn_t *activation)
{
    u32 processes = 0, instances = 0;
    char aside[PATH_MAX];
    FILE *file;

    EXPECT_OF(GPU_OF(device), activation && mode <= 1);
    REQUIRE(gpu->mig_capable, NOT_SUPPORTED);
    REQUIRE(!geteuid(), NO_PERMISSION);
    each_process(gpu, NULL, count_process, &processes);
    EACH_INSTANCE(i)
        instances += i->gpu == gpu;
    *activation = processes || instances ? IN_USE : gpu->major < HOPPER ? RESET_REQUIRED : SUCCESS;
    snprintf(aside, sizeof aside, "%s.new", mig_mode_file(gpu));
    file = fopen(aside, "we");
    REQUIRE(file, UNKNOWN);
    fprintf(file, "%u%u", *activation ? mig_mode_of(gpu, CURRENT) : mode, mode);
    REQUIRE(!fclose(file) && !rename(aside, mig_mode_file(gpu)), UNKNOWN);
    return SUCCESS;
}

NUMBER(nvmlDeviceGetMaxMigDeviceCount, GPU_OF, gpu->mig_capable ? MOST_MIG : 0)
NUMBER(nvmlDeviceIsMigDeviceHandle, BOARD_OF, as_mig(device) != NULL)
NUMBER(nvmlDeviceGetGpuInstanceId, MIG_OF, mig->instance->id)
NUMBER(nvmlDeviceGetComputeInstanceId, MIG_OF, mig->id)

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(const void *device, u32 index,
                                                     const void **mig)
{
    EXPECT_OF(GPU_OF(device), mig && index < MOST_MIG);
    REQUIRE(gpu->mig_capable, NOT_SUPPORTED);
    *mig = nth_mig(gpu, index);
    return *mig ? SUCCESS : NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const void *mig, const void **device)
{
    const struct mig *found = as_mig(mig);

    EXPECT(found && device);
    *device = found->instance->gpu;
    return SUCCESS;
}

/* A compute instance has its share of the GPU instance's multiprocessors. */
static u32 multiprocessors(const struct profile *profile, u32 slices)
{
    return profile->multiprocessors * slices / profile->slices;
}

struct attributes {
    u32 multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    u64 memory_mib;
};

API nvmlReturn_t nvmlDeviceGetAttributes_v2(const void *device, struct attributes *attributes)
{
    const struct mig *mig = as_mig(device);
    const struct profile *profile;

    ENTER;
    REQUIRE(mig, as_gpu(device) ? NOT_SUPPORTED : INVALID_ARGUMENT);
    REQUIRE(attributes, INVALID_ARGUMENT);
    profile = mig->instance->profile;
    *attributes = (struct attributes){
        .multiprocessors = multiprocessors(profile, mig->slices),
        .copy_engines = profile->copy_engines,
        .decoders = profile->decoders,
        .jpeg = profile->jpeg,
        .ofa = profile->ofa,
        .gpu_slices = profile->slices,
        .compute_slices = mig->slices,
        .memory_mib = profile->memory_mib,
    };
    return SUCCESS;
}

ALIAS(nvmlDeviceGetAttributes, nvmlDeviceGetAttributes_v2)

struct gpu_profile {
    u32 id, p2p, slices, instances, multiprocessors;
    u32 copy_engines, decoders, encoders, jpeg, ofa;
    u64 memory_mib;
};

struct gpu_profile_v2 {
    u32 version, id, p2p, slices, instances, multiprocessors;
    u32 copy_engines, decoders, encoders, jpeg, ofa;
    u64 memory_mib;
    char name[96];
};

/* The fields that both versions of a profile have. */
#define PROFILE_OF(profile)                                                                        \
    .id = (profile)->id, .slices = (profile)->slices, .instances = (profile)->instances,           \
    .multiprocessors = (profile)->multiprocessors, .copy_engines = (profile)->copy_engines,        \
    .decoders = (profile)->decoders, .jpeg = (profile)->jpeg, .ofa = (profile)->ofa,               \
    .memory_mib = (profile)->memory_mib

static nvmlReturn_t profile_of(const void *device, u32 index, const struct profile **profile)
{
    GPU_OF(device);
    for (*profile = gpu->profiles; (*profile)->name; ++*profile)
        if ((*profile)->index == index)
            return SUCCESS;
    return NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(const void *device, u32 index,
                                                     struct gpu_profile *info)
{
    const struct profile *profile;
    nvmlReturn_t result;

    EXPECT(info);
    result = profile_of(device, index, &profile);
    REQUIRE(!result, result);
    *info = (struct gpu_profile){PROFILE_OF(profile)};
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(const void *device, u32 index,
                                                      struct gpu_profile_v2 *info)
{
    const struct profile *profile;
    nvmlReturn_t result;

    EXPECT(info);
    REQUIRE(info->version == (sizeof *info | 2 << 24), ARGUMENT_VERSION_MISMATCH);
    result = profile_of(device, index, &profile);
    REQUIRE(!result, result);
    *info = (struct gpu_profile_v2){.version = info->version, PROFILE_OF(profile)};
    snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
    return SUCCESS;
}

struct placement {
    u32 start, size;
};

API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(const void *device, u32 id,
                                                               struct placement *places, u32 *count)
{
    EXPECT_OF(GPU_OF(device), count);
    *count = 0;
    for (const struct profile *profile = gpu->profiles; profile->name; profile++) {
        if (profile->id != id)
            continue;
        for (; profile->starts[*count] >= 0; ++*count)
            if (places)
                places[*count] =
                    (struct placement){profile->starts[*count], profile->memory_slices};
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(const void *device, u32 id, u32 *count)
{
    u32 taken = 0;

    EXPECT_OF(GPU_OF(device), count);
    EACH_INSTANCE(i)
        if (i->gpu == gpu)
            taken |= ((1U << i->profile->memory_slices) - 1) << i->start;
    for (const struct profile *profile = gpu->profiles; profile->name; profile++) {
        const u32 size = (1U << profile->memory_slices) - 1;

        if (profile->id != id)
            continue;
        *count = 0;
        for (const int *start = profile->starts; *start >= 0; start++)
            *count += !(taken & size << *start) && *count < profile->instances;
        return SUCCESS;
    }
    return NOT_SUPPORTED;
}

API nvmlReturn_t nvmlDeviceGetGpuInstances(const void *device, u32 id, const void **instances,
                                           u32 *count)
{
    EXPECT_OF(GPU_OF(device), instances && count);
    REQUIRE(mig_mode_of(gpu, CURRENT), NOT_SUPPORTED);
    *count = 0;
    EACH_INSTANCE(i)
        if (i->gpu == gpu && i->profile->id == id)
            instances[(*count)++] = i;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceById(const void *device, u32 id, const void **instance)
{
    EXPECT_OF(GPU_OF(device), instance);
    EACH_INSTANCE(i) {
        if (i->gpu == gpu && i->id == id) {
            *instance = i;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

struct gpu_instance_info {
    const void *device;
    u32 id, profile;
    struct placement placement;
};

API nvmlReturn_t nvmlGpuInstanceGetInfo(const void *handle, struct gpu_instance_info *info)
{
    const struct instance *instance = as_instance(handle);

    EXPECT(instance && info);
    *info = (struct gpu_instance_info){
        .device = instance->gpu,
        .id = instance->id,
        .profile = instance->profile->id,
        .placement = {instance->start, instance->profile->memory_slices},
    };
    return SUCCESS;
}

/*
 * Compute instance profiles are numbered by their slices. The driver's own number, which
 * nvidia-smi shows, is the same.
 */
static const u32 compute_slices[] = {1, 2, 3, 4, 7, 8, 6};

static u32 compute_profile(u32 slices)
{
    u32 index = 0;

    while (index < COUNT(compute_slices) - 1 && compute_slices[index] != slices)
        index++;
    return index;
}

struct compute_profile {
    u32 id, slices, instances, multiprocessors;
    u32 copy_engines, decoders, encoders, jpeg, ofa;
};

struct compute_profile_v2 {
    u32 version;
    struct compute_profile v1;
    char name[96];
};

static nvmlReturn_t compute_profile_info(const void *handle, u32 index, u32 engines,
                                         struct compute_profile *info)
{
    const struct instance *instance = as_instance(handle);
    const struct profile *profile;

    REQUIRE(instance && info && engines == 0, INVALID_ARGUMENT);
    profile = instance->profile;
    REQUIRE(index < COUNT(compute_slices) && compute_slices[index] <= profile->slices,
            NOT_SUPPORTED);
    *info = (struct compute_profile){
        .id = index,
        .slices = compute_slices[index],
        .instances = profile->slices / compute_slices[index],
        .multiprocessors = multiprocessors(profile, compute_slices[index]),
        .copy_engines = profile->copy_engines,
        .decoders = profile->decoders,
        .jpeg = profile->jpeg,
        .ofa = profile->ofa,
    };
    return SUCCESS;
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(const void *instance, u32 index,
                                                              u32 engines,
                                                              struct compute_profile *info)
{
    ENTER;
    return compute_profile_info(instance, index, engines, info);
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(const void *handle, u32 index,
                                                               u32 engines,
                                                               struct compute_profile_v2 *info)
{
    const struct profile *profile;
    nvmlReturn_t result;

    EXPECT(info);
    REQUIRE(info->version == (sizeof *info | 2 << 24), ARGUMENT_VERSION_MISMATCH);
    result = compute_profile_info(handle, index, engines, &info->v1);
    REQUIRE(!result, result);
    profile = as_instance(handle)->profile;
    if (info->v1.slices == profile->slices)
        snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
    else
        snprintf(info->name, sizeof info->name, "MIG %uc.%s", info->v1.slices, profile->name);
    return SUCCESS;
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(const void *handle, u32 id,
                                                                    u32 *count)
{
    const struct instance *instance = as_instance(handle);
    u32 left;

    EXPECT(instance && count && id < COUNT(compute_slices));
    left = instance->profile->slices;
    EACH_MIG(mig)
        left -= mig->instance == instance ? mig->slices : 0;
    *count = left / compute_slices[id];
    return SUCCESS;
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(const void *handle, u32 id,
                                                    const void **instances, u32 *count)
{
    const struct instance *instance = as_instance(handle);

    EXPECT(instance && instances && count);
    *count = 0;
    EACH_MIG(mig)
        if (mig->instance == instance && compute_profile(mig->slices) == id)
            instances[(*count)++] = mig;
    return SUCCESS;
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(const void *handle, u32 id,
                                                       const void **compute)
{
    const struct instance *instance = as_instance(handle);

    EXPECT(instance && compute);
    EACH_MIG(mig) {
        if (mig->instance == instance && mig->id == id) {
            *compute = mig;
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

struct compute_instance_info {
    const void *device, *instance;
    u32 id, profile;
    struct placement placement; /* since _v2 */
};

API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(const void *handle,
                                               struct compute_instance_info *info)
{
    const struct mig *mig = as_mig(handle);

    EXPECT(mig && info);
    *info = (struct compute_instance_info){
        .device = mig->instance->gpu,
        .instance = mig->instance,
        .id = mig->id,
        .profile = compute_profile(mig->slices),
        .placement = {mig->start, mig->slices},
    };
    return SUCCESS;
}

API nvmlReturn_t nvmlComputeInstanceGetInfo(const void *handle, struct compute_instance_info *info)
{
    struct compute_instance_info full;
    nvmlReturn_t result;

    REQUIRE(info, INVALID_ARGUMENT);
    result = nvmlComputeInstanceGetInfo_v2(handle, &full);
    REQUIRE(!result, result);
    memcpy(info, &full, offsetof(struct compute_instance_info, placement));
    return SUCCESS;
}

/* --- Creating and destroying instances ---------------------------------------------------- */

/* One process changes them at a time. Return the lock's descriptor; -1 without permission. */
static int begin_change(void)
{
    int lock;

    if (geteuid() || !is_node(0, CONFIG_CAPABILITY, "nvidia-caps/nvidia-cap%u", CONFIG_CAPABILITY))
        return -1;
    lock = open(state_file("nvml-mig.lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock >= 0)
        flock(lock, LOCK_EX);
    look_at_mig();
    return lock;
}

static nvmlReturn_t end_change(int lock)
{
    char aside[PATH_MAX];
    FILE *file;

    snprintf(aside, sizeof aside, "%s", state_file("nvml-mig.new"));
    file = fopen(aside, "we");
    if (file) {
        for (struct instance *i = gpu_instances; i < gpu_instances + instance_count; i++) {
            if (i->profile)
                fprintf(file, "g %u %u %u %u\n", index_of(i->gpu), i->profile->id, i->id, i->start);
            else
                fputs("g -\n", file);
        }
        for (struct mig *mig = migs; mig < migs + mig_count; mig++) {
            if (mig->instance)
                fprintf(file, "c %u %u %u %u\n", (u32)(mig->instance - gpu_instances), mig->id,
                        mig->slices, mig->start);
            else
                fputs("c -\n", file);
        }
    }
    if (!file || fclose(file) || rename(aside, state_file("nvml-mig"))) {
        close(lock);
        return UNKNOWN;
    }
    close(lock);
    return SUCCESS;
}

/* The kernel's entry of an instance, and its node. */
static void add_capability(const struct instance *instance, const struct mig *mig)
{
    u32 minor_number = mig ? mig->capability : instance->capability;
    char below[128], path[PATH_MAX];
    struct statx config;
    FILE *file;

    snprintf(below, sizeof below, "../proc/driver/nvidia/capabilities/gpu%u",
             instance->gpu->minor);
    mkdir(state_file(below), 0755);
    strcat(below, "/mig");
    mkdir(state_file(below), 0755);
    snprintf(below + strlen(below), 16, "/gi%u", instance->id);
    mkdir(state_file(below), 0755);
    if (mig) {
        snprintf(below + strlen(below), 16, "/ci%u", mig->id);
        mkdir(state_file(below), 0755);
    }
    strcat(below, "/access");
    file = fopen(state_file(below), "we");
    if (file) {
        fprintf(file, "DeviceFileMinor: %u\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
                minor_number);
        fclose(file);
    }
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", dev, CONFIG_CAPABILITY);
    if (look_at(path, STATX_TYPE, &config))
        return;
    snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%u", dev, minor_number);
    syscall(SYS_mknodat, AT_FDCWD, path, S_IFCHR | 0444,
            (minor_number & 0xff) | config.stx_rdev_major << 8 | (minor_number & ~0xffu) << 12);
}

/* Remove the kernel's entry; the device node stays, as with the real driver. */
static void remove_capability(const struct instance *instance, const struct mig *mig)
{
    char below[128];
    size_t length;

    snprintf(below, sizeof below, "../proc/driver/nvidia/capabilities/gpu%u/mig/gi%u",
             instance->gpu->minor, instance->id);
    if (mig)
        snprintf(below + strlen(below), 16, "/ci%u", mig->id);
    length = strlen(below);
    strcat(below, "/access");
    unlink(state_file(below));
    below[length] = '\0';
    rmdir(state_file(below));
}

/* The table entry for a new GPU instance that starts there; NULL if the slices are not free. */
static struct instance *place_for(const struct gpu *gpu, const struct profile *profile, u32 start)
{
    const u32 size = (1U << profile->memory_slices) - 1;
    struct instance *place = NULL;
    u32 taken = 0, same = 0;

    EACH_INSTANCE(i) {
        if (i->gpu != gpu)
            continue;
        taken |= ((1U << i->profile->memory_slices) - 1) << i->start;
        same += i->profile == profile;
    }
    if (taken & size << start || same >= profile->instances)
        return NULL;
    for (place = gpu_instances; place < gpu_instances + instance_count && place->profile;)
        place++;
    return place < gpu_instances + MOST_INSTANCES ? place : NULL;
}

static u32 free_id(const struct gpu *gpu, u32 first)
{
    u32 id = first;

again:
    EACH_INSTANCE(i)
        if (i->gpu == gpu && i->id == id) {
            id++;
            goto again;
        }
    return id;
}

static nvmlReturn_t make_instance(const struct gpu *gpu, u32 id, const struct placement *wanted,
                                  const void **handle)
{
    const struct profile *profile = gpu->profiles;
    struct instance *place = NULL;
    const int *start;
    int lock;

    REQUIRE(mig_mode_of(gpu, CURRENT), NOT_SUPPORTED);
    while (profile->name && profile->id != id)
        profile++;
    REQUIRE(profile->name, NOT_SUPPORTED);
    lock = begin_change();
    REQUIRE(lock >= 0, NO_PERMISSION);
    for (start = profile->starts; *start >= 0 && !place; start += !place)
        if (!wanted || wanted->start == (u32)*start)
            place = place_for(gpu, profile, (u32)*start);
    if (!place) {
        close(lock);
        return INSUFFICIENT_RESOURCES;
    }
    put_instance(place, gpu, id, free_id(gpu, profile->first_id), (u32)*start);
    if (place == gpu_instances + instance_count)
        instance_count++;
    add_capability(place, NULL);
    *handle = place;
    return end_change(lock);
}

API nvmlReturn_t nvmlDeviceCreateGpuInstance(const void *device, u32 id, const void **instance)
{
    ENTER;
    GPU_OF(device);
    REQUIRE(instance, INVALID_ARGUMENT);
    return make_instance(gpu, id, NULL, instance);
}

API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(const void *device, u32 id,
                                                          const struct placement *placement,
                                                          const void **instance)
{
    ENTER;
    GPU_OF(device);
    REQUIRE(placement && instance, INVALID_ARGUMENT);
    return make_instance(gpu, id, placement, instance);
}

API nvmlReturn_t nvmlGpuInstanceDestroy(const void *handle)
{
    struct instance *instance = (struct instance *)as_instance(handle);
    int lock;

    ENTER;
    REQUIRE(instance, INVALID_ARGUMENT);
    lock = begin_change();
    REQUIRE(lock >= 0, NO_PERMISSION);
    EACH_MIG(mig)
        if (mig->instance == instance) {
            close(lock);
            return IN_USE;
        }
    remove_capability(instance, NULL);
    *instance = (struct instance){0};
    return end_change(lock);
}

API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(const void *handle, u32 id,
                                                      const void **compute)
{
    const struct instance *instance = as_instance(handle);
    struct mig *place = migs;
    u32 taken = 0, number_of_it = 0, start = 0;
    int lock;

    ENTER;
    REQUIRE(instance && compute && id < COUNT(compute_slices), INVALID_ARGUMENT);
    lock = begin_change();
    REQUIRE(lock >= 0, NO_PERMISSION);
    EACH_MIG(mig)
        if (mig->instance == instance)
            taken |= ((1U << mig->slices) - 1) << mig->start;
    while (start < instance->profile->slices && taken & ((1U << compute_slices[id]) - 1) << start)
        start++;
    if (start + compute_slices[id] > instance->profile->slices) {
        close(lock);
        return INSUFFICIENT_RESOURCES;
    }
again:
    EACH_MIG(mig)
        if (mig->instance == instance && mig->id == number_of_it) {
            number_of_it++;
            goto again;
        }
    while (place < migs + mig_count && place->instance)
        place++;
    put_mig(place, instance, number_of_it, compute_slices[id], start);
    if (place == migs + mig_count)
        mig_count++;
    add_capability(instance, place);
    *compute = place;
    return end_change(lock);
}

API nvmlReturn_t nvmlComputeInstanceDestroy(const void *handle)
{
    struct mig *mig = (struct mig *)as_mig(handle);
    u32 processes = 0;
    int lock;

    ENTER;
    REQUIRE(mig, INVALID_ARGUMENT);
    each_process(mig->instance->gpu, mig, count_process, &processes);
    REQUIRE(!processes, IN_USE);
    lock = begin_change();
    REQUIRE(lock >= 0, NO_PERMISSION);
    remove_capability(mig->instance, mig);
    *mig = (struct mig){0};
    return end_change(lock);
}

/* --- Events ---------------------------------------------------------------------------- */

enum { POLL_MS = 200 };

struct event {
    const void *device;
    u64 type, data;
    u32 instance, compute;
};

struct event_set {
    u64 types[MOST_GPUS]; /* the registered event types of each GPU of the scenario */
    off_t seen;           /* how far the file of events has been read */
    int changes;          /* inotify on the state directory; -1 if it is not available */
};

API nvmlReturn_t nvmlEventSetCreate(struct event_set **set)
{
    struct statx status;

    EXPECT(set);
    *set = calloc(1, sizeof **set);
    REQUIRE(*set, UNKNOWN);
    (*set)->changes = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if ((*set)->changes >= 0 &&
        inotify_add_watch((*set)->changes, NODE_STATE, IN_MODIFY | IN_CREATE | IN_MOVED_TO | IN_DELETE) <
            0) {
        close((*set)->changes);
        (*set)->changes = -1;
    }
    if (!look_at(state_file("nvml-events"), STATX_SIZE, &status))
        (*set)->seen = status.stx_size;
    return SUCCESS;
}

API nvmlReturn_t nvmlEventSetFree(struct event_set *set)
{
    EXPECT(set);
    if (set->changes >= 0)
        close(set->changes);
    free(set);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceRegisterEvents(const void *device, u64 types, struct event_set *set)
{
    EXPECT_OF(GPU_OF(device), set);
    set->types[gpu - GPUS] |= types;
    return SUCCESS;
}

/* The next event of the file that is registered. */
static int next_event(struct event_set *set, struct event *event)
{
    int descriptor = open(state_file("nvml-events"), O_RDONLY | O_CLOEXEC), found = 0;
    char line[128], *end;
    ssize_t length;

    if (descriptor < 0)
        return 0;
    while (!found && (length = pread(descriptor, line, sizeof line - 1, set->seen)) > 0) {
        const char *at = line;
        u64 index;

        line[length] = '\0';
        end = strchr(line, '\n');
        if (!end)
            break;
        *end = '\0';
        set->seen += end + 1 - line;
        index = number(&at);
        event->type = number(&at);
        event->data = number(&at);
        event->instance = event->compute = 0xffffffff;
        if (*at == ' ') {
            event->instance = (u32)number(&at);
            event->compute = (u32)number(&at);
        }
        if (index < GPU_COUNT && as_gpu(&GPUS[index]) && set->types[index] & event->type) {
            event->device = &GPUS[index];
            found = 1;
        }
    }
    close(descriptor);
    return found;
}

static u64 now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ULL + now.tv_nsec / 1000000;
}

/* The error of a GPU in the set. */
static nvmlReturn_t suffer_of_set(const struct event_set *set)
{
    nvmlReturn_t fault = SUCCESS;

    for (u32 i = 0; i < GPU_COUNT && !fault; i++)
        if (set->types[i])
            fault = suffer_of(&GPUS[i]);
    return fault;
}

/* Sleep until something changes in the state directory, at most until the timeout. */
static void sleep_until_change(const struct event_set *set, u64 ms)
{
    struct pollfd changes = {.fd = set->changes, .events = POLLIN};
    char told[4096];

    if (set->changes < 0) {
        sleep_ms(ms < POLL_MS ? ms : POLL_MS);
        return;
    }
    poll(&changes, 1, (int)(ms < INT_MAX ? ms : INT_MAX));
    while (read(set->changes, told, sizeof told) > 0)
        ;
}

API nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event *event, u32 timeout_ms)
{
    u64 end = now_ms() + timeout_ms;

    for (;;) {
        nvmlReturn_t fault;
        u64 now;

        ENTER;
        REQUIRE(set && event, INVALID_ARGUMENT);
        fault = suffer_of_set(set);
        REQUIRE(!fault, fault);
        if (next_event(set, event))
            return SUCCESS;
        now = now_ms();
        REQUIRE(now < end, TIMEOUT);
        sleep_until_change(set, end - now);
    }
}

ALIAS(nvmlEventSetWait, nvmlEventSetWait_v2)

/* --- Everything else ------------------------------------------------------------------- */

#define UNSUPPORTED(name)                                                                          \
    API nvmlReturn_t name(void);                                                                   \
    API nvmlReturn_t name(void)                                                                    \
    {                                                                                              \
        ENTER;                                                                                     \
        return NOT_SUPPORTED;                                                                      \
    }

#include "unsupported.h"
