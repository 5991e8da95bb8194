/* containerd-shim-nvidia-v1, before there is a Python interpreter.
 *
 * Starting an interpreter takes ten times as long as the work of a verb. If a fork server runs
 * (shim/forkserver/forkserver.py), this program passes it the verb: its arguments and environment,
 * its directory and its three standard descriptors. A process forked from that server executes the
 * verb with them, and this one exits with its status. In every other case, and after any failure
 * before the verb has started, it becomes the Python program next to it (its own path and ".py"),
 * which does the same, only slower. In a self-contained tree (made with -DTREE) the tree's own
 * interpreter runs that program.
 *
 * A copy of this file alone, under any name, has no program next to it. It becomes the launcher of
 * the proper name that PATH leads to, as containerd would find it.
 *
 * A `delete` without anything left to do needs neither: fast_delete.c answers it.
 *
 * It decides nothing else. Both sides check the user of the other (SO_PEERCRED); the fork server
 * checks that the verb's process context is its own.
 *
 * Source: unix(7) SCM_RIGHTS, SO_PEERCRED; shim/verbs/warmstart.py for the protocol.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "launcher.h"
#include "tree.h"

/* Not the status of a verb: its process ended without a report. */
#define LOST 256
/* Milliseconds. A hundred callers at once wait for seconds, and starting a hundred interpreters
 * instead would take longer; but containerd's limit for `delete` is five seconds. A fork server
 * that neither accepts nor runs is frozen, which shows in two steps. */
#define STEP 100
#define PATIENCE 4000
/* For one that still imports. A new interpreter executes the verb sooner, but its shim uses six
 * times the memory for the life of the pod. */
#define PATIENCE_AT_START 500

extern char **environ;

/* Directories of sockets of a containerd without root privileges. */
static const char *const of_user[] = {"/run/user/%u/containerd/s", "/tmp/containerd-s-%u"};

/* The length of the texts, then the texts. */
static char content[sizeof(uint32_t) + LONGEST];
static size_t length = sizeof(uint32_t);

/* Append a text and its end to the request; 0 if there is no room. */
static int add(const char *text)
{
    size_t size = strlen(text) + 1;

    if (size > sizeof content - length)
        return 0;
    memcpy(content + length, text, size);
    length += size;
    return 1;
}

/* The value of a flag of Go's kind: "-flag value", "--flag=value". */
static const char *flag(int argc, char **argv, const char *name)
{
    size_t size = strlen(name);

    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];

        if (word[0] != '-')
            continue;
        word += word[1] == '-' ? 2 : 1;
        if (strncmp(word, name, size))
            continue;
        if (word[size] == '=')
            return word + size + 1;
        if (!word[size] && i + 1 < argc)
            return argv[i + 1];
    }
    return "";
}

static uint64_t fnv1a(uint64_t hash, const char *text)
{
    do
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3;
    while (*text++);
    return hash;
}

/* Limit each receiving or sending call to this many milliseconds. */
static int set_timeout(int fd, int option, int milliseconds)
{
    struct timeval value = {milliseconds / 1000, milliseconds % 1000 * 1000};

    return !setsockopt(fd, SOL_SOCKET, option, &value, sizeof value);
}

/* Connect; while the server's backlog is full, wait and subtract that from patience. */
static int connect_within(int fd, const struct sockaddr_un *name, int *patience)
{
    for (; *patience > 0; *patience -= STEP) {
        if (!connect(fd, (const struct sockaddr *)name, sizeof *name))
            return 1;
        if (errno != EAGAIN && errno != EINTR)
            return 0;
    }
    return 0;
}

/* Connect to the fork server that listens at a name in a directory; -1 if there is none of ours. */
static int reach_in(const char *directory, const char *link, int *patience, pid_t *server)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    struct ucred peer;
    socklen_t size = sizeof peer;
    int fd;

    if (snprintf(name.sun_path, sizeof name.sun_path, "%s/%s", directory, link) >=
        (int)sizeof name.sun_path)
        return -1;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (set_timeout(fd, SO_SNDTIMEO, STEP) && connect_within(fd, &name, patience) &&
        set_timeout(fd, SO_SNDTIMEO, *patience) && set_timeout(fd, SO_RCVTIMEO, STEP) &&
        !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) &&
        peer.uid == geteuid() && peer.gid == getegid()) {
        *server = peer.pid;
        return fd;
    }
    close(fd);
    return -1;
}

/* Connect to the fork server of this containerd, wherever its sockets are (directories() of
 * shim/sockets.py); -1 if there is none of ours. The link of one that still imports has its own
 * kind.
 *
 * patience: milliseconds for the connection; the time used is subtracted. */
static int reach(char kind, const char *address, const char *script, int *patience, pid_t *server)
{
    char mounts[64], link[32], own[PATH_MAX];
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    uint64_t hash = 0xcbf29ce484222325;
    ssize_t got = readlink("/proc/self/ns/mnt", mounts, sizeof mounts - 1);
    int fd;

    if (got < 0)
        return -1;
    mounts[got] = 0;
    hash = fnv1a(fnv1a(fnv1a(hash, address), script), mounts);
    snprintf(link, sizeof link, "%c%016llx", kind, (unsigned long long)hash);
    fd = reach_in(DIRECTORY, link, patience, server);
    if (fd < 0 && runtime && *runtime == '/' &&
        snprintf(own, sizeof own, "%s/containerd/s", runtime) < (int)sizeof own)
        fd = reach_in(own, link, patience, server);
    for (size_t i = 0; fd < 0 && i < sizeof of_user / sizeof *of_user; i++) {
        snprintf(own, sizeof own, of_user[i], (unsigned)geteuid());
        fd = reach_in(own, link, patience, server);
    }
    return fd;
}

static int read_of(pid_t pid, const char *file, char text[256])
{
    char name[32];
    ssize_t got;
    int fd;

    snprintf(name, sizeof name, "/proc/%d/%s", (int)pid, file);
    fd = open(name, O_RDONLY | O_CLOEXEC);
    got = fd < 0 ? -1 : read(fd, text, 255);
    if (fd >= 0)
        close(fd);
    text[got < 0 ? 0 : got] = 0;
    return got > 0;
}

/* Whether a process waits for a processor, or has run since the last call. */
static int moves(pid_t pid)
{
    static char before[256];
    char now[256], *state;

    if (!read_of(pid, "stat", now))
        return 0;
    state = strrchr(now, ')');
    if (state && state[1] && state[2] == 'R')
        return 1;
    if (!read_of(pid, "schedstat", now) || !strcmp(before, now))
        return 0;
    strcpy(before, now);
    return 1;
}

/* Wait until a fork of the fork server is ready, unless that takes too long.
 *
 * patience: the milliseconds left for the connection. */
static int ready(int fd, pid_t server, int patience)
{
    int accepted = 0;

    for (int waited = 0; waited < (accepted ? PATIENCE : patience); waited += STEP) {
        char byte;
        ssize_t got = recv(fd, &byte, 1, 0);

        if (got == 1 && byte == ACCEPTED)
            accepted = 1;
        else if (got >= 0)
            return got == 1 && byte == READY;
        else if (errno != EINTR && errno != EAGAIN)
            return 0;
        else if (errno == EAGAIN && !accepted && !moves(server))
            return 0; /* a sleeping server would have woken up for a connection */
    }
    return 0;
}

/* Send the request: its length, then its content. */
static int send_request(int fd)
{
    uint32_t head = length - sizeof head;
    size_t sent = 0;

    memcpy(content, &head, sizeof head);
    while (sent < length) {
        ssize_t now = send(fd, content + sent, length - sent, MSG_NOSIGNAL);

        if (now <= 0)
            return 0;
        sent += now;
    }
    return 1;
}

/* Let the verb start, with our descriptors.
 *
 * Not earlier: descriptors sent to a process that does not read stay open in its queue, and
 * containerd would wait for the end of our standard output for ever.
 */
static int send_go(int fd, int directory)
{
    char go = GO;
    int fds[4] = {directory, 0, 1, 2};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof fds)];
    } control = {0};
    struct iovec part = {&go, sizeof go};
    struct msghdr message = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.space,
        .msg_controllen = sizeof control.space,
    };

    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(&control.header), fds, sizeof fds);
    return sendmsg(fd, &message, MSG_NOSIGNAL) == sizeof go;
}

/* Let the fork server execute the verb; return its status, LOST, or -1 if it has not started. */
static int ask(int argc, char **argv, const char *script)
{
    char number[32], byte;
    int directory = -1, status = -1, patience = PATIENCE;
    const char *off = getenv(SWITCH);
    pid_t server;
    int fd;

    if (off && !strcmp(off, "0"))
        return -1;
    snprintf(number, sizeof number, "%d", argc - 1);
    if (!add(script) || !add(number))
        return -1;
    for (int i = 1; i < argc; i++)
        if (!add(argv[i]))
            return -1;
    for (char **variable = environ; *variable; variable++)
        if (!add(*variable))
            return -1;
    for (int standard = 0; standard <= 2; standard++)
        if (fcntl(standard, F_GETFD) < 0)
            return -1;
    fd = reach(READY_LINK, flag(argc, argv, "address"), script, &patience, &server);
    if (fd < 0 && patience > 0) {
        patience = PATIENCE_AT_START;
        fd = reach(STARTING_LINK, flag(argc, argv, "address"), script, &patience, &server);
    }
    if (fd < 0)
        return -1;
    directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (directory >= 0 && send_request(fd) && ready(fd, server, patience) &&
        set_timeout(fd, SO_RCVTIMEO, 0) && send_go(fd, directory)) {
        ssize_t got;

        while ((got = recv(fd, &byte, 1, 0)) < 0 && errno == EINTR)
            ;
        status = got == 1 ? (unsigned char)byte : LOST;
    }
    if (directory >= 0)
        close(directory);
    close(fd);
    return status;
}

/* Become the installed launcher, if this one is a copy without a program. */
static void become_installed(const char *script, char **argv)
{
    const char *places = getenv("PATH"), *end;
    char path[PATH_MAX], real[PATH_MAX], program[PATH_MAX + sizeof SUFFIX];

    if (!access(script, F_OK))
        return;
    for (; places && *places; places = *end ? end + 1 : end) {
        end = strchrnul(places, ':');
        /* A relative path would start at the current directory, a container's bundle. */
        if (*places != '/' ||
            snprintf(path, sizeof path, "%.*s/" NAME, (int)(end - places), places) >= PATH_MAX ||
            !realpath(path, real))
            continue;
        snprintf(program, sizeof program, "%s" SUFFIX, real);
        if (!access(program, F_OK))
            execv(real, argv);
    }
    dprintf(2, NAME ": %s: %s, and no other is in PATH; install it again", script,
            strerror(ENOENT));
    exit(1);
}

int main(int argc, char **argv)
{
    char *script, *self = own_path(NAME, sizeof SUFFIX);
    const char *last = argc > 1 ? argv[argc - 1] : "";
    int status;

    if (asprintf(&script, "%s" SUFFIX, self) < 0)
        return 1;
    if (!strcmp(last, "delete") && answer_fast_delete(argc, argv))
        return 0;
    become_installed(script, argv);
    if (!strcmp(last, "start") || !strcmp(last, "delete")) {
        status = ask(argc, argv, script);
        /* A delete can be repeated, and containerd would not call it again. A start that was under
         * way may have left a shim behind, and there must not be two. */
        if (status == LOST && *last == 's') {
            dprintf(2, NAME ": start: the process that did it was killed; try again");
            return 1;
        }
        if (status >= 0 && status != LOST)
            return status;
    }
#ifdef TREE
    run_in_tree(above(self, 2), NAME, script, argc > 0 ? argv + 1 : argv);
#else
    if (argc > 0)
        argv[0] = script;
    execv(script, argv);
    dprintf(2, NAME ": %s: %s; install it again", script, strerror(errno));
    return 1;
#endif
}
