/* The program that `nvshim verify` runs in its containers: it reports from inside what a container
 * sees and can open.
 *
 *   nvshim-probe exit CODE      exit with CODE
 *   nvshim-probe echo CODE      print "here" and exit with CODE; for an exec
 *   nvshim-probe look NUMBER... report what is visible, and try to open devices by their numbers
 *   nvshim-probe hold           report what is visible, wait for SIGTERM, report again, exit with 0
 *   nvshim-probe count NUMBER   check that NUMBER GPUs are here and open, print the result for an
 *                               operator, exit with 0 or 1; for the pods of the cluster's test Job
 *
 * A report of `look` and `hold` has one item per line, and ends with the line "end":
 *
 *   node PATH MAJOR:MINOR ERRNO   a character device below /dev, and the errno of opening it; 0: ok
 *   number MAJOR:MINOR ERRNO      a device without a node here, opened through a temporary node
 *   made MAJOR:MINOR ERRNO        the temporary node could not be created, so it is unreachable
 *   mount NAME                    the last component of a mount point
 *   file NAME                     a libcuda in a directory where the shim puts the driver's libraries
 *
 * The program is static and needs no file of the image. integration/verify/probe.py parses its
 * reports.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* The driver's major number is assigned by the kernel (Documentation/admin-guide/devices.txt). The
 * minor numbers of GPUs are below those of the control nodes. */
#define NVIDIA 195
#define CONTROL 254

/* A limit for trees such as /dev/shm, which have no devices but may have many files. */
#define DEEPEST 3

static int opened(const char *path)
{
    /* O_NONBLOCK: opening a terminal or a pipe could block. */
    int fd = open(path, O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);

    if (fd < 0)
        return errno;
    close(fd);
    return 0;
}

static void nodes(const char *directory, int depth)
{
    char path[PATH_MAX];
    struct dirent *entry;
    struct stat status;
    DIR *stream = opendir(directory);

    if (!stream)
        return;
    while ((entry = readdir(stream))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) >= (int)sizeof path ||
            lstat(path, &status))
            continue;
        if (S_ISDIR(status.st_mode) && depth < DEEPEST)
            nodes(path, depth + 1);
        else if (S_ISCHR(status.st_mode) && !strchr(path, ' ') && !strchr(path, '\n'))
            printf("node %s %u:%u %d\n", path, major(status.st_rdev), minor(status.st_rdev),
                   opened(path));
    }
    closedir(stream);
}

/* Print the name of each mount point, or search for a name that starts with `wanted`. */
static int mounts(const char *wanted)
{
    char line[3 * PATH_MAX], *place, *end;
    FILE *file = fopen("/proc/self/mountinfo", "re");
    int found = 0;

    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        place = line;
        for (int field = 0; field < 4 && place; field++) {
            place = strchr(place, ' ');
            place = place ? place + 1 : NULL;
        }
        if (!place || !(end = strchr(place, ' ')))
            continue;
        *end = 0;
        place = strrchr(place, '/') ? strrchr(place, '/') + 1 : place;
        if (!wanted)
            printf("mount %s\n", place);
        else if (!strncmp(place, wanted, strlen(wanted)))
            found = 1;
    }
    fclose(file);
    return found;
}

/* Where the shim puts libraries: hooks/image/layout.py. It may do so without a mount. */
static const char *const DIRECTORIES[] = {
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
    "/.containerd-shim-nvidia/lib64", NULL,
};

/* Search for a file with content whose name starts with `wanted`, and print the names if asked. */
static int files(const char *wanted, int print)
{
    char path[PATH_MAX];
    struct dirent *entry;
    struct stat status;
    int found = 0;

    for (int i = 0; DIRECTORIES[i]; i++) {
        DIR *stream = opendir(DIRECTORIES[i]);

        while (stream && (entry = readdir(stream))) {
            if (strncmp(entry->d_name, wanted, strlen(wanted)) || strchr(entry->d_name, '\n') ||
                snprintf(path, sizeof path, "%s/%s", DIRECTORIES[i], entry->d_name) >=
                    (int)sizeof path ||
                lstat(path, &status) || !S_ISREG(status.st_mode) || !status.st_size)
                continue;
            found = 1;
            if (print)
                printf("file %s\n", entry->d_name);
        }
        if (stream)
            closedir(stream);
    }
    return found;
}

/* Create a node with this number, as a process with CAP_MKNOD could, and try to open it. */
static void number(const char *text)
{
    char path[] = "/dev/.nvshim-probe";
    unsigned high, low;

    if (sscanf(text, "%u:%u", &high, &low) != 2)
        return;
    unlink(path);
    if (mknod(path, S_IFCHR | 0600, makedev(high, low))) {
        printf("made %s %d\n", text, errno);
        return;
    }
    printf("number %s %d\n", text, opened(path));
    unlink(path);
}

/* Count the driver's nodes in /dev and the GPUs among them; set `wrong` if a GPU cannot be opened. */
static void count(int *all, int *gpus, char wrong[128])
{
    char path[PATH_MAX];
    struct dirent *entry;
    struct stat status;
    DIR *stream = opendir("/dev");
    int error;

    while (stream && (entry = readdir(stream))) {
        if (snprintf(path, sizeof path, "/dev/%s", entry->d_name) >= (int)sizeof path ||
            lstat(path, &status) || !S_ISCHR(status.st_mode) || major(status.st_rdev) != NVIDIA)
            continue;
        ++*all;
        if (minor(status.st_rdev) >= CONTROL)
            continue;
        ++*gpus;
        error = opened(path);
        /* On a simulated node no driver is behind the device node, so ENXIO means allowed. */
        if (error && error != ENXIO)
            snprintf(wrong, 128, "%.32s cannot be opened (%s)", path, strerror(error));
    }
    if (stream)
        closedir(stream);
}

static int check_count(int wanted)
{
    const char *remedy = "run nvshim explain NAMESPACE/POD on the node; kubectl describe pod";
    char wrong[128] = "";
    int all = 0, gpus = 0;

    count(&all, &gpus, wrong);
    if (gpus != wanted)
        snprintf(wrong, sizeof wrong, "%d GPU%s", gpus, gpus == 1 ? "" : "s");
    else if (!wanted && all)
        snprintf(wrong, sizeof wrong, "%d control nodes of the driver", all);
    else if ((wanted > 0) != (mounts("libcuda.so.") || files("libcuda.so.", 0)))
        snprintf(wrong, sizeof wrong, wanted ? "the driver's libcuda is missing" : "the driver's libcuda is here");
    if (!*wrong) {
        printf("passed  %d GPU%s, as requested\n", gpus, gpus == 1 ? "" : "s");
        return 0;
    }
    printf("failed  expected: %d GPU%s in this container\n", wanted, wanted == 1 ? "" : "s");
    printf("        seen: %s\n        do: %s\n", wrong, remedy);
    return 1;
}

static void look(char **numbers)
{
    nodes("/dev", 0);
    for (; *numbers; numbers++)
        number(*numbers);
    mounts(NULL);
    files("libcuda.so.", 1);
    puts("end");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    sigset_t term;
    int got;

    /* Block SIGTERM, so that sigwait() cannot miss it. */
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, NULL);
    if (argc == 3 && !strcmp(argv[1], "exit"))
        return atoi(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "echo")) {
        puts("here");
        return atoi(argv[2]);
    }
    if (argc == 3 && !strcmp(argv[1], "count"))
        return check_count(atoi(argv[2]));
    if (argc >= 2 && !strcmp(argv[1], "look")) {
        look(argv + 2);
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "hold")) {
        look(argv + 2);
        sigwait(&term, &got);
        look(argv + 2);
        return 0;
    }
    fputs("usage: nvshim-probe exit|echo CODE, look NUMBER..., hold, count NUMBER\n", stderr);
    return 2;
}
