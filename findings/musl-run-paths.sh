#!/bin/bash
# Packages:  musl 1.2.3-1, musl-dev 1.2.3-1 (Debian 12)
# Guess:     A program's RPATH and RUNPATH name directories for its libraries as with glibc: RPATH comes before
#            LD_LIBRARY_PATH and RUNPATH behind it, $LIB is lib or lib64, and an entry that makes no sense is no harm to
#            the others. A library in LD_PRELOAD that is not there is reported.
# Behaviour: For musl both are one and come behind LD_LIBRARY_PATH, so what a program brings along and protects by RPATH
#            is replaced by a driver's directory in the variable. It knows only $ORIGIN: any other word with $ drops the
#            whole list, also the directories before it, without a word. An empty entry in LD_LIBRARY_PATH is not the
#            current directory. A preload that is not there, as a limiter of GPU memory, is nothing, and says nothing.
# Seen (the RPATH has the library "own", LD_LIBRARY_PATH another, and the current directory a third):
#   glibc: RPATH own; RUNPATH own; own and $LIB: own
#   glibc, LD_LIBRARY_PATH: RPATH own; RUNPATH variable; empty entry current
#   glibc, LD_PRELOAD not there: a warning, own
#   musl: RPATH own; RUNPATH own; own and $LIB: not found
#   musl, LD_LIBRARY_PATH: RPATH variable; RUNPATH variable; empty entry own
#   musl, LD_PRELOAD not there: own
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download musl=1.2.3-1 musl-dev=1.2.3-1
for package in *.deb; do dpkg -x "$package" root; done

printf '#include <stdio.h>\nconst char *name(void);\nint main(void) { puts(name()); }\n' >program.c
for name in own variable current; do
  mkdir $name
  echo "const char *name(void) { return \"$name\"; }" >library.c
  gcc -shared -fPIC -nostdlib -Wl,-soname,libname.so -o $name/libname.so library.c
done
parts=root/usr/lib/x86_64-linux-musl libc=$directory/root/lib/x86_64-linux-musl/libc.so
musl=(-nostdinc -isystem root/usr/include/x86_64-linux-musl -nostdlib -pie "-Wl,-dynamic-linker,$libc"
  $parts/Scrt1.o $parts/crti.o program.c own/libname.so "$libc" $parts/crtn.o)
glibc=(program.c own/libname.so)
for name in glibc musl; do
  declare -n arguments=$name
  gcc -o $name-RPATH "${arguments[@]}" "-Wl,--disable-new-dtags,-rpath,$directory/own"
  gcc -o $name-RUNPATH "${arguments[@]}" "-Wl,--enable-new-dtags,-rpath,$directory/own"
  gcc -o $name-LIB "${arguments[@]}" "-Wl,--enable-new-dtags,-rpath,$directory/own:/opt/\$LIB"
done

# What a program of these prints, in the directory of the third library.
ask() { (cd current && env "${@:2}" "../$1" 2>error || echo "not found"); }
for name in glibc musl; do
  echo "$name: RPATH $(ask $name-RPATH); RUNPATH $(ask $name-RUNPATH); own and \$LIB: $(ask $name-LIB)"
  variable=LD_LIBRARY_PATH=$directory/variable
  echo "$name, LD_LIBRARY_PATH: RPATH $(ask $name-RPATH "$variable"); RUNPATH $(ask $name-RUNPATH "$variable");" \
    "empty entry $(ask $name-RUNPATH LD_LIBRARY_PATH=:/none)"
  found=$(ask $name-RUNPATH LD_PRELOAD=/none/libpreload.so)
  echo "$name, LD_PRELOAD not there: $(! [ -s current/error ] || echo 'a warning, ')$found"
done | tee seen
diff seen - <<'END'
glibc: RPATH own; RUNPATH own; own and $LIB: own
glibc, LD_LIBRARY_PATH: RPATH own; RUNPATH variable; empty entry current
glibc, LD_PRELOAD not there: a warning, own
musl: RPATH own; RUNPATH own; own and $LIB: not found
musl, LD_LIBRARY_PATH: RPATH variable; RUNPATH variable; empty entry own
musl, LD_PRELOAD not there: own
END
