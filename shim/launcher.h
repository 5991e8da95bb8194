/* What the parts of the native launcher have of each other. */

#ifndef NVSHIM_LAUNCHER_H
#define NVSHIM_LAUNCHER_H

/* Answer `delete` if nothing is left of the container and its shim; 0 if that is for a program
 * to say which can also clean up. */
int answer_settled(int argc, char **argv);

#endif
