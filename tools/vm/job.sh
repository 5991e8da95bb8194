#!/bin/sh
# Runs in the guest, as root: mounts what the host shares, runs the job, tells its exit code.
#
# The host shares a directory with the tag "job", in which are
#   shares   lines of "TAG PATH": what else is shared, and where it belongs
#   run      the job, a shell script

# The emulator's exit code is (CODE << 1) | 1 for a CODE that is written to this port. Those
# below 16 are left out, so that the emulator's own failure, 1, is none of ours.
finish() {
    sync
    code=$1
    [ "$code" -le 100 ] || code=100
    printf "\\$(printf %o $((code + 16)))" | dd of=/dev/port bs=1 seek=244 conv=notrunc 2>/dev/null
    # Only if the port is not what it should be.
    poweroff -f
}

# On a slow machine the devices may still be without their driver, which has no end to wait for.
share() {
    mkdir -p "$2"
    tries=600
    until mount -t 9p -o "ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose" "$1" "$2"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.1
    done
}

share job /run/nvshim-job || finish 100
while read -r tag path; do
    share "$tag" "$path" || finish 100
done </run/nvshim-job/shares
/bin/sh /run/nvshim-job/run
finish $?
