/* The interface between the parts of the native launcher. */

#ifndef NVSHIM_LAUNCHER_H
#define NVSHIM_LAUNCHER_H

/* Answer `delete` if nothing is left of the container and its shim; return 0 to leave the verb to
 * Python, which can also clean up. */
int answer_fast_delete(int argc, char **argv);

/* From the compiler's command line (shim/forkserver/launcher.py), so that each has one home:
 *
 * NAME                  of the program
 * SUFFIX                of the Python program next to it
 * DIRECTORY             of sockets, root's
 * SWITCH                the variable that turns fork servers off
 * ACCEPTED, READY, GO   the words of the fork server's protocol, a byte each
 * READY_LINK, STARTING_LINK   the first letter of a link to a fork server
 * LONGEST               bytes of a request
 * LONGEST_ID            characters of an id or a namespace
 * FILES_AFTER_DELETE    the files of a bundle without anything to clean up
 */

#endif
