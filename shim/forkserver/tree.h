/* Where a program of a self-contained tree finds the tree's own interpreter (make dist). */
#ifndef NVSHIM_TREE_H
#define NVSHIM_TREE_H

/* The absolute path of this program, with room bytes for more behind its end; exits if unknown. */
char *own_path(const char *name, int room);

/* Run a program by the interpreter of a tree, and not return.
 *
 * tree: where it lies.
 * name: what the process is called (proc(5), comm): one of the links in runtime/as/.
 * script: the Python program; NULL if the arguments name it.
 * arguments: what follows it, with NULL at the end.
 */
void run_in_tree(const char *tree, const char *name, const char *script, char **arguments)
    __attribute__((noreturn));

/* The directory so many levels above a path. */
const char *above(const char *path, int levels);

#endif
