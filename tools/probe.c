/*
 * Prints what a container sees, from inside.
 *
 *   probe dlopen NAME...   "NAME PATH" for each library that loads, "NAME - REASON" for the others
 *   probe open PATH...     "PATH OK", or "PATH ERRNO" by name (ENXIO: allowed, but no driver)
 *   probe winsize COUNT    "ROWS COLUMNS" of the terminal, now and at each change: COUNT lines
 *   probe signals          "ready", then "got NAME" for each signal; exits with 0 at TERM
 *   probe exit CODE        nothing but the exit code
 *
 * dlopen and open exit with 1 if anything failed, and with 2 if the arguments are wrong.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int load(char **names)
{
	int failed = 0;

	for (; *names; names++) {
		struct link_map *map;
		void *library = dlopen(*names, RTLD_NOW | RTLD_GLOBAL);

		if (library && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0) {
			printf("%s %s\n", *names, map->l_name);
		} else {
			printf("%s - %s\n", *names, dlerror());
			failed = 1;
		}
	}
	return failed;
}

static int open_each(char **paths)
{
	int failed = 0;

	for (; *paths; paths++) {
		int fd = open(*paths, O_RDWR | O_NONBLOCK | O_CLOEXEC);

		if (fd >= 0) {
			printf("%s OK\n", *paths);
			close(fd);
		} else {
			printf("%s %s\n", *paths, strerrorname_np(errno));
			failed = 1;
		}
	}
	return failed;
}

static int winsize(long count)
{
	sigset_t changes;
	int number;

	/* Blocked before the first line, so that no change after it is missed. */
	sigemptyset(&changes);
	sigaddset(&changes, SIGWINCH);
	sigprocmask(SIG_BLOCK, &changes, NULL);
	while (count-- > 0) {
		struct winsize size;

		if (ioctl(STDIN_FILENO, TIOCGWINSZ, &size) != 0) {
			perror("TIOCGWINSZ");
			return 1;
		}
		printf("%d %d\n", size.ws_row, size.ws_col);
		if (count > 0)
			sigwait(&changes, &number);
	}
	return 0;
}

static int signals(void)
{
	sigset_t all;
	int number;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	puts("ready");
	do {
		sigwait(&all, &number);
		printf("got %s\n", sigabbrev_np(number));
	} while (number != SIGTERM);
	return 0;
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc >= 3 && strcmp(argv[1], "dlopen") == 0)
		return load(argv + 2);
	if (argc >= 3 && strcmp(argv[1], "open") == 0)
		return open_each(argv + 2);
	if (argc == 3 && strcmp(argv[1], "winsize") == 0)
		return winsize(atol(argv[2]));
	if (argc == 2 && strcmp(argv[1], "signals") == 0)
		return signals();
	if (argc == 3 && strcmp(argv[1], "exit") == 0)
		return atoi(argv[2]);
	fputs("usage: probe dlopen|open|winsize|signals|exit ARGUMENT...\n", stderr);
	return 2;
}
