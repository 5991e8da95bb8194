/* The interpreter of a self-contained tree, wherever the tree lies.
 *
 *     bin/NAME          the program that calls this
 *     runtime/as/NAME   a link to the tree's own dynamic loader, for the process's name
 *     runtime/bin/      python3, which starts here too, and the interpreter proper: python
 *     runtime/lib/      its libraries, and the loader
 *
 * The kernel finds a program's loader by an absolute path or one below the current directory, and
 * a tree has neither. So the loader itself is executed, with the interpreter as its argument; the
 * interpreter then takes itself for runtime/bin/python3, which is a program like any other.
 * Libraries that the tree lacks (a driver's) are found as usual. A path with characters that the
 * loader would split or expand is refused.
 *
 * Source: ld.so(8), --library-path, --argv0; proc(5), /proc/self/exe.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tree.h"

/* Appended to the path of a program that was removed or replaced while it runs. */
#define GONE " (deleted)"

char *own_path(const char *name, int room)
{
    static char path[PATH_MAX];
    ssize_t got = readlink("/proc/self/exe", path, sizeof path - 1 - room);

    if (got < 0) {
        dprintf(2, "%s: /proc/self/exe: %s; mount /proc", name, strerror(errno));
        exit(1);
    }
    if (got > (ssize_t)strlen(GONE) && !memcmp(path + got - strlen(GONE), GONE, strlen(GONE)))
        got -= strlen(GONE);
    path[got] = 0;
    return path;
}

static void *have(const char *name, void *memory)
{
    if (!memory) {
        dprintf(2, "%s: %s", name, strerror(ENOMEM));
        exit(1);
    }
    return memory;
}

const char *above(const char *path, int levels)
{
    char *directory = have(path, strdup(path));

    while (levels-- > 0) {
        char *slash = strrchr(directory, '/');
        if (slash)
            *slash = 0;
    }
    return directory;
}

static char *below(const char *tree, const char *directory, const char *name)
{
    char *path;

    return have(name, asprintf(&path, "%s/%s%s", tree, directory, name) < 0 ? NULL : path);
}

void run_in_tree(const char *tree, const char *name, const char *script, char **arguments)
{
    char *loader = below(tree, "runtime/as/", name), **argv;
    size_t count = 0, used = 0;

    if (strpbrk(tree, ":;$")) {
        dprintf(2, "%s: %s: none of : ; $ may be in its path; put it elsewhere", name, tree);
        exit(1);
    }
    while (arguments[count])
        count++;
    argv = have(name, calloc(count + 9, sizeof *argv));
    argv[used++] = loader;
    argv[used++] = "--library-path";
    argv[used++] = below(tree, "runtime/", "lib");
    argv[used++] = "--argv0";
    argv[used++] = below(tree, "runtime/bin/", "python3");
    argv[used++] = below(tree, "runtime/bin/", "python");
    /* Write nothing into the tree; ignore the environment and the user's packages. */
    argv[used++] = script ? "-IBS" : "-B";
    if (script)
        argv[used++] = (char *)script;
    /* What containerd is preloaded with is for the system's libc. The loader would say that it does
     * not fit ours, and what "start" says is taken for its answer. */
    if (script) {
        unsetenv("LD_PRELOAD");
        unsetenv("LD_AUDIT");
    }
    memcpy(argv + used, arguments, count * sizeof *argv);
    execv(loader, argv);
    dprintf(2, "%s: %s: %s; install it again", name, loader, strerror(errno));
    exit(1);
}
