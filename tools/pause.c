/* The first process of a pod: it holds the namespaces, and waits.
 *
 * In a pod with a shared process namespace it is process 1: there it reaps orphaned processes. It
 * handles SIGINT and SIGTERM, because the kernel ignores signals that process 1 does not handle. */

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number)
{
    (void)number;
    _exit(0);
}

static void reap(int number)
{
    (void)number;
    while (waitpid(-1, 0, WNOHANG) > 0)
        ;
}

int main(void)
{
    struct sigaction on_end = {.sa_handler = end};
    struct sigaction on_child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};

    sigaction(SIGINT, &on_end, 0);
    sigaction(SIGTERM, &on_end, 0);
    sigaction(SIGCHLD, &on_child, 0);
    for (;;)
        pause();
}
