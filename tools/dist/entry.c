/* bin/nvshim and runtime/bin/python3 of a self-contained tree. One becomes the command line. The
 * other becomes a normal Python: sys.executable names it, and children are started with it.
 *
 * bin/nvshim.py gets the name of the call as its first argument: a link with another program's name
 * makes it act for that program.
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
