/* bin/nvshim and runtime/bin/python3 of a self-contained tree: one becomes the command line, the
 * other a Python like any other (what sys.executable says, with which children are started).
 *
 * bin/nvshim.py learns from its first argument what it was called: it acts for other programs if
 * it is linked under their names.
 */

#include <stdio.h>
#include <string.h>

#include "tree.h"

int main(int argc, char **argv)
{
#ifdef NVSHIM
    char script[8192], *self = own_path("nvshim", sizeof ".py");

    (void)argc;
    snprintf(script, sizeof script, "%s.py", self);
    run_in_tree(above(self, 2), "nvshim", script, argv);
#else
    char *self = own_path("python3", 0);

    run_in_tree(above(self, 3), "python3", NULL, argc > 0 ? argv + 1 : argv);
#endif
}
