#!/bin/bash
# Packages:  musl 1.2.3-1, musl-dev 1.2.3-1 (Debian 12)
# Guess:     A library that a process has loaded by its path is found when another library or a dlopen asks for its
#            soname, as with glibc. Python packages load CUDA's libraries in this way before their extension modules.
# Behaviour: musl does not read DT_SONAME. It knows a loaded library by the name only if it was searched for by that
#            name. A library that was loaded by its path is not found again, even if its file has the soname for a
#            name.
# Seen:
#   glibc: path loaded, soname loaded, library that needs it loaded
#   musl: path loaded, soname not found, library that needs it not found
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download musl=1.2.3-1 musl-dev=1.2.3-1
for package in *.deb; do dpkg -x "$package" root; done

cat >load.c <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
  for (int i = 1; i + 1 < count; i += 2)
    printf("%s%s %s", i > 1 ? ", " : "", words[i], dlopen(words[i + 1], RTLD_NOW) ? "loaded" : "not found");
  puts("");
  return 0;
}
END
gcc -o load-glibc load.c
parts=root/usr/lib/x86_64-linux-musl libc=root/lib/x86_64-linux-musl/libc.so
gcc -nostdinc -isystem root/usr/include/x86_64-linux-musl -nostdlib -pie -o load-musl \
  $parts/Scrt1.o $parts/crti.o load.c $libc $parts/crtn.o -Wl,-dynamic-linker,"$directory/$libc"

mkdir libraries
echo 'int first(void) { return 1; }' >first.c
echo 'int first(void); int second(void) { return first(); }' >second.c
gcc -shared -fPIC -nostdlib -Wl,-soname,libfirst.so.1 -o libraries/libfirst.so.1 first.c
gcc -shared -fPIC -nostdlib -o libraries/libsecond.so second.c libraries/libfirst.so.1
for libc in glibc musl; do
  echo "$libc: $("./load-$libc" path "$directory/libraries/libfirst.so.1" soname libfirst.so.1 \
    'library that needs it' "$directory/libraries/libsecond.so")"
done | tee seen
diff seen - <<'END'
glibc: path loaded, soname loaded, library that needs it loaded
musl: path loaded, soname not found, library that needs it not found
END
