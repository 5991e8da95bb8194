/* What nvshim verify runs in its containers: what a container sees and may open, told from inside.
 *
 *   nvshim-probe exit CODE      nothing but the exit code
 *   nvshim-probe echo CODE      "here", and the exit code: for an exec
 *   nvshim-probe look NUMBER... what is there, and whether devices can be opened by their numbers
 *   nvshim-probe hold           what is there; again when it gets SIGTERM, which ends it with 0
 *   nvshim-probe count NUMBER   a line for people: whether it has so many GPUs, and can open them; 0,
 *                               or 1 if not. It is for pods of a cluster, which nobody looks into
 *
 * `look` and `hold` write a line for each thing, and "end" behind the last:
 *
 *   node PATH MAJOR:MINOR ERRNO   a character device below /dev, and what opening it says; 0: opened
 *   number MAJOR:MINOR ERRNO      the same of a device that is not there, by a node made for that
 *   made MAJOR:MINOR ERRNO        the node could not be made, so nobody can open it that way
 *   mount NAME                    the last part of a place where something is mounted
 *
 * It is static and needs no file of the image. integration/verify/program.py reads its lines.
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

/* The driver's major number is the kernel's own (Documentation/admin-guide/devices.txt); its GPUs'
 * minor numbers are below those of the control nodes. */
#define NVIDIA 195
#define CONTROL 254

/* /dev/shm and the like have no devices, and may have much else. */
#define DEEPEST 3

static int opened(const char *path)
{
    /* O_NONBLOCK: a terminal or a pipe would have it wait. */
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

/* Write the name of each place where something is mounted, or look for one that begins so. */
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

/* A node of that number would be there if somebody with CAP_MKNOD made it: is it of any use? */
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

/* The nodes of the driver in /dev and the GPUs among them; "" or what is wrong with one. */
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
        /* With nothing behind it a node is the container's all the same: a simulated node. */
        if (error && error != ENXIO)
            snprintf(wrong, 128, "%.32s cannot be opened (%s)", path, strerror(error));
    }
    if (stream)
        closedir(stream);
}

static int judged(int wanted)
{
    const char *remedy = "nvshim explain NAMESPACE/POD on the node, and kubectl describe pod";
    char wrong[128] = "";
    int all = 0, gpus = 0;

    count(&all, &gpus, wrong);
    if (gpus != wanted)
        snprintf(wrong, sizeof wrong, "%d of them", gpus);
    else if (!wanted && all)
        snprintf(wrong, sizeof wrong, "%d control nodes of the driver", all);
    else if ((wanted > 0) != mounts("libcuda.so."))
        snprintf(wrong, sizeof wrong, wanted ? "no libcuda of the driver" : "the driver's libcuda");
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
    puts("end");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    sigset_t term;
    int got;

    /* Blocked, so that it is waited for and not missed. */
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
        return judged(atoi(argv[2]));
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
