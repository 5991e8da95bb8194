/* `delete` after a shim that ended in good order.
 *
 * containerd calls `delete` after each exit of a shim, and a user waits for it. Nearly always
 * nothing is left to clean up, and that answer needs no interpreter: this takes 1 ms, Python 18.
 *
 * shim/verbs/delete.py is the verb. This is a shortcut in front of it, which changes nothing and
 * answers only if delete.py would give the same answer and also change nothing
 * (tests/unit/verbs/test_fast_delete.py runs both on the same bundles). It answers if
 *
 *   - the arguments are those of containerd, with a valid id and namespace;
 *   - the bundle holds only the files that remain after an answered Delete
 *     (FILES_AFTER_DELETE in shim/bundle.py): no runtime call, logger, member, holder, claim or
 *     staging directory;
 *   - nothing is mounted in the bundle;
 *   - the runtime that options.json names has no state of the container, and its init is gone;
 *   - the socket that `address` names is gone, and so is the container's announcement next to it.
 *
 * In every other case, and if any of this cannot be determined, it leaves the verb to delete.py.
 *
 * Source: containerd core/runtime/v2/binary.go Delete; api/runtime/task/v2/shim.proto
 * DeleteResponse; proc(5), /proc/PID/mountinfo.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "launcher.h"

#define SCHEME "unix://"
#define LONGEST_FILE 4096
#define KILLED (128 + 9) /* as shim/verbs/delete.py */

/* FILES_AFTER_DELETE of shim/bundle.py. */
static const char *const known_names[] = {".", "..", FILES_AFTER_DELETE};

struct arguments {
    const char *namespace, *id, *bundle;
};

static int is_one_of(const char *text, const char *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(text, list[i]))
            return 1;
    return 0;
}

static int is_alphanumeric(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

/* What check_id of shim/files.py accepts. */
static int is_identifier(const char *text)
{
    size_t size = 0;

    if (!text || !is_alphanumeric(text[0]))
        return 0;
    for (; text[size]; size++)
        if (!is_alphanumeric(text[size]) && !strchr("_.-", text[size]))
            return 0;
    return size <= LONGEST_ID;
}

/* Read the arguments; 0 unless they are those that every containerd passes. */
static int read_arguments(int argc, char **argv, struct arguments *given)
{
    for (int i = 1; i < argc - 1; i++) {
        const char **value = NULL, *ignored;

        if (!strcmp(argv[i], "-debug"))
            continue;
        if (!strcmp(argv[i], "-namespace"))
            value = &given->namespace;
        else if (!strcmp(argv[i], "-id"))
            value = &given->id;
        else if (!strcmp(argv[i], "-bundle"))
            value = &given->bundle;
        else if (!strcmp(argv[i], "-address") || !strcmp(argv[i], "-publish-binary"))
            value = &ignored;
        if (!value || ++i >= argc - 1)
            return 0;
        *value = argv[i];
    }
    if (!given->bundle || !given->bundle[0])
        given->bundle = ".";
    return is_identifier(given->id) && is_identifier(given->namespace);
}

static int is_gone(const char *path)
{
    struct stat status;

    return lstat(path, &status) < 0 && errno == ENOENT;
}

static int holds_nothing_else(int bundle)
{
    int copy = openat(bundle, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), only = 1;
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    struct dirent *entry;

    if (!directory)
        return 0;
    while (only) {
        errno = 0;
        entry = readdir(directory);
        if (!entry)
            break;
        only = is_one_of(entry->d_name, known_names,
                         sizeof known_names / sizeof *known_names);
    }
    only = only && !errno;
    closedir(directory);
    return only;
}

/* Whether no line of mountinfo contains a path below the bundle. */
static int holds_no_mount(const char *bundle)
{
    static char content[1 << 20];
    char real[PATH_MAX], wanted[PATH_MAX + 2];
    size_t length = 0;
    ssize_t got;
    int fd;

    if (!realpath(bundle, real))
        return 0;
    for (const char *c = real; *c; c++)
        if (*c <= ' ' || *c > '~' || *c == '\\' || *c == '#')
            return 0; /* the kernel escapes some of them */
    snprintf(wanted, sizeof wanted, " %s/", real);
    fd = open("/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    while ((got = read(fd, content + length, sizeof content - 1 - length)) > 0)
        length += got;
    close(fd);
    if (got < 0 || !length || length == sizeof content - 1)
        return 0;
    content[length] = 0;
    return !strstr(content, wanted);
}

/* Read a short file, and strip it; -1 if it cannot be read, or is not a line of text. */
static int read_line(int bundle, const char *name, char text[LONGEST_FILE])
{
    int fd = openat(bundle, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat status;
    ssize_t got = -1;

    if (fd < 0)
        return -1;
    if (!fstat(fd, &status) && S_ISREG(status.st_mode))
        got = read(fd, text, LONGEST_FILE);
    close(fd);
    if (got < 0 || got >= LONGEST_FILE || memchr(text, 0, got))
        return -1;
    while (got && strchr(" \t\r\n", text[got - 1]))
        got--;
    text[got] = 0;
    return got;
}

/* Read the init's pid; 0 if there was none; -1 if it still exists or cannot be read. */
static int read_init(int bundle)
{
    char text[LONGEST_FILE], name[32], *end;
    long pid;

    if (faccessat(bundle, "init.pid", F_OK, AT_SYMLINK_NOFOLLOW))
        return errno == ENOENT ? 0 : -1;
    if (read_line(bundle, "init.pid", text) <= 0)
        return -1;
    pid = strtol(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || pid > INT_MAX)
        return -1;
    snprintf(name, sizeof name, "/proc/%ld", pid);
    return is_gone(name) ? pid : -1;
}

static int runtime_has_nothing(int bundle, const char *id)
{
    static const char key[] = "\"root\": \"";
    char text[LONGEST_FILE], path[LONGEST_FILE + LONGEST_ID + 2], *root, *end;

    if (read_line(bundle, "options.json", text) <= 0 || strchr(text, '\\'))
        return 0;
    root = strstr(text, key);
    if (!root)
        return 0;
    root += sizeof key - 1;
    end = strchr(root, '"');
    if (*root != '/' || !end)
        return 0;
    *end = 0;
    snprintf(path, sizeof path, "%s/%s", root, id);
    return is_gone(path);
}

static int socket_is_gone(int bundle, const char *id)
{
    char text[LONGEST_FILE], announcement[LONGEST_FILE + LONGEST_ID + 2];
    const char *path = text + strlen(SCHEME);

    if (read_line(bundle, "address", text) <= 0 || strncmp(text, SCHEME "/", strlen(SCHEME) + 1))
        return 0;
    snprintf(announcement, sizeof announcement, "%s.%s", path, id);
    return is_gone(path) && is_gone(announcement);
}

static unsigned char *add_varint(unsigned char *at, uint64_t value)
{
    for (; value > 127; value >>= 7)
        *at++ = (value & 127) | 128;
    *at++ = value;
    return at;
}

/* Write a DeleteResponse: pid, exit_status, exited_at. */
static int answer(int pid)
{
    unsigned char text[64], time[32], *at = text, *end = time;
    struct timespec now;
    size_t size;

    if (clock_gettime(CLOCK_REALTIME, &now))
        return 0;
    *end++ = 1 << 3;
    end = add_varint(end, now.tv_sec);
    *end++ = 2 << 3;
    end = add_varint(end, now.tv_nsec);
    *at++ = 1 << 3;
    at = add_varint(at, pid);
    *at++ = 2 << 3;
    at = add_varint(at, KILLED);
    *at++ = 3 << 3 | 2;
    at = add_varint(at, end - time);
    memcpy(at, time, end - time);
    size = at - text + (end - time);
    return write(1, text, size) == (ssize_t)size;
}

int answer_fast_delete(int argc, char **argv)
{
    struct arguments given = {0};
    int bundle, pid, is_settled;

    if (!read_arguments(argc, argv, &given))
        return 0;
    bundle = open(given.bundle, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (bundle < 0)
        return 0;
    pid = read_init(bundle);
    is_settled = pid >= 0 && holds_nothing_else(bundle) && runtime_has_nothing(bundle, given.id) &&
                 socket_is_gone(bundle, given.id) && holds_no_mount(given.bundle);
    close(bundle);
    return is_settled && answer(pid);
}
