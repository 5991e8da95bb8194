#!/bin/bash
# Packages:  watchdog 7.1.0, watchfiles 1.3.0, inotify_simple 2.0.1 (PyPI), chokidar 5.0.0 (npm)
# Guess:     A library that watches files tells of each change of the file config.yaml that a pod has from a ConfigMap,
#            as a device plugin's settings, if it watches the file or its folder.
# Behaviour: The kubelet never writes the file. It is a link to ..data/config.yaml, and the kubelet renames another link
#            over ..data. watchdog on the file tells nothing, ever. watchfiles and inotify tell of the first update
#            only, when the old file is removed, so a first test succeeds. On the folder watchdog and inotify tell of
#            each update, but never by the name config.yaml, so a filter for it drops all. Only chokidar works both
#            ways, and watchfiles on the folder.
# Seen (whether config.yaml, or only other names, are told in three updates):
#   watchdog, file:         nothing; nothing; nothing
#   watchdog, folder:       others; others; others
#   watchfiles, file:       told; nothing; nothing
#   watchfiles, folder:     told; told; told
#   inotify_simple, file:   told; nothing; nothing
#   inotify_simple, folder: others; others; others
#   chokidar, file:         told; told; told
#   chokidar, folder:       told; told; told
# Needs node 20 or later with npm, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check watchdog==7.1.0 watchfiles==1.3.0 inotify_simple==2.0.1
npm install --silent --no-audit --no-fund --cache "$directory/cache" chokidar@5.0.0 >/dev/null

# Each watcher prints "ready", and then for each line that it reads what it was told within a second.
cat >watch.py <<'END'
import os
import sys
import threading
import time

library, path = sys.argv[1:]
told = []


def tell(name):
    # inotify gives no name for the watched file itself.
    told.append(os.path.basename(os.fsdecode(name)) or "config.yaml")


def watch_watchdog():
    from watchdog.events import FileSystemEventHandler
    from watchdog.observers import Observer

    handler = FileSystemEventHandler()
    handler.on_any_event = lambda event: tell(event.src_path)
    observer = Observer()
    observer.schedule(handler, path)
    observer.start()
    observer.join()


def watch_watchfiles():
    import watchfiles

    for changes in watchfiles.watch(path):
        for _, name in changes:
            tell(name)


def watch_inotify_simple():
    from inotify_simple import INotify, flags

    inotify = INotify()
    inotify.add_watch(path, flags.MODIFY | flags.ATTRIB | flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF)
    while True:
        for event in inotify.read():
            tell(event.name)


threading.Thread(target=globals()[f"watch_{library}"], daemon=True).start()
time.sleep(1)
print("ready", flush=True)
for _ in sys.stdin:
    time.sleep(1)
    names = told.copy()
    told.clear()
    print("told" if "config.yaml" in names else "others" if names else "nothing", flush=True)
os._exit(0)
END
cat >watch.mjs <<'END'
import path from 'node:path';
import readline from 'node:readline';
import { watch } from 'chokidar';

const told = [];
const watcher = watch(process.argv[3], { ignoreInitial: true, depth: 0 });
watcher.on('all', (_, name) => told.push(path.basename(name)));
watcher.on('ready', () => setTimeout(() => console.log('ready'), 1000));
for await (const _ of readline.createInterface({ input: process.stdin })) {
  await new Promise((done) => setTimeout(done, 1000));
  const names = told.splice(0);
  console.log(names.includes('config.yaml') ? 'told' : names.length ? 'others' : 'nothing');
}
process.exit(0);
END
cat >ask.py <<'END'
import os
import shutil
import subprocess
import sys


def write(volume, number):
    """Write a ConfigMap as the kubelet does."""
    os.mkdir(f"{volume}/..{number}")
    with open(f"{volume}/..{number}/config.yaml", "w", encoding="utf-8") as file:
        file.write(f"number: {number}\n")
    os.symlink(f"..{number}", f"{volume}/..data_tmp")
    os.rename(f"{volume}/..data_tmp", f"{volume}/..data")
    if number == 0:
        os.symlink("..data/config.yaml", f"{volume}/config.yaml")
    else:
        shutil.rmtree(f"{volume}/..{number - 1}")


programs = {name: [sys.executable, "watch.py", name] for name in ("watchdog", "watchfiles", "inotify_simple")}
programs["chokidar"] = ["node", "watch.mjs", "chokidar"]
for name, program in programs.items():
    for kind in ("file", "folder"):
        volume = os.path.abspath(f"{name}-{kind}")
        os.mkdir(volume)
        write(volume, 0)
        path = f"{volume}/config.yaml" if kind == "file" else volume
        with subprocess.Popen([*program, path], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == "ready\n"
            answers = []
            for number in (1, 2, 3):
                write(volume, number)
                child.stdin.write("\n")
                child.stdin.flush()
                answers.append(child.stdout.readline().strip())
            child.stdin.close()
        print(f"{f'{name}, {kind}:':23} {'; '.join(answers)}")
END
venv/bin/python ask.py | tee seen
diff seen - <<'END'
watchdog, file:         nothing; nothing; nothing
watchdog, folder:       others; others; others
watchfiles, file:       told; nothing; nothing
watchfiles, folder:     told; told; told
inotify_simple, file:   told; nothing; nothing
inotify_simple, folder: others; others; others
chokidar, file:         told; told; told
chokidar, folder:       told; told; told
END
