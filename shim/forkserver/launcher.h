/* What the parts of the native launcher have of each other. */

#ifndef NVSHIM_LAUNCHER_H
#define NVSHIM_LAUNCHER_H

/* Answer `delete` if nothing is left of the container and its shim; 0 if that is for a program
 * to say which can also clean up. */
int answer_settled(int argc, char **argv);

/* From the compiler's command line (shim/forkserver/launcher.py), so that each has one home:
 *
 * NAME                  of the program
 * SUFFIX                of the Python program beside it
 * DIRECTORY             of sockets, root's
 * SWITCH                the variable that turns fork servers off
 * ACCEPTED, READY, GO   the words of the fork server's protocol, a byte each
 * LONGEST               bytes of a request
 * LONGEST_ID            characters of an id or a namespace
 * SETTLED               the files of a bundle for which nothing has to be done
 */

#endif
