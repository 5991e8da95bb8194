#!/bin/bash
# Packages:  golang-github-containerd-ttrpc-dev 1.2.4-2, golang-1.24 (Debian 13)
# Guess:     If a client of ttrpc, as containerd is for its shims, cancels the context of a call, the context of the
#            server's method is cancelled, as with gRPC.
# Behaviour: The client returns and sends nothing: the protocol has no message for it. The method runs on and its answer
#            is thrown away. Only a deadline gets there, in the request's header, and the end of the connection, which
#            containerd shares for all calls of a pod. So a shim cannot stop to create a container because the request
#            for it was cancelled; whoever made it has to delete what may be there.
# Seen (what the method sees):
#   deadline: context deadline exceeded
#   cancelled by the client: runs on for two seconds
#   connection closed: context canceled
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root gopath/src/ask
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --download-only install golang-github-containerd-ttrpc-dev=1.2.4-2 \
  golang-1.24-go >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done

cat >gopath/src/ask/main.go <<'END'
package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

func main() {
	called, found := make(chan bool, 1), make(chan string, 1)
	server, err := ttrpc.NewServer()
	if err != nil {
		panic(err)
	}
	server.Register("test.Service", map[string]ttrpc.Method{
		"Wait": func(ctx context.Context, unmarshal func(interface{}) error) (interface{}, error) {
			if err := unmarshal(&emptypb.Empty{}); err != nil {
				return nil, err
			}
			called <- true
			select {
			case <-ctx.Done():
				found <- ctx.Err().Error()
			case <-time.After(2 * time.Second):
				found <- "runs on for two seconds"
			}
			return &emptypb.Empty{}, nil
		},
	})
	listener, err := net.Listen("unix", "socket")
	if err != nil {
		panic(err)
	}
	go server.Serve(context.Background(), listener)

	for _, how := range []string{"deadline", "cancelled by the client", "connection closed"} {
		connection, err := net.Dial("unix", "socket")
		if err != nil {
			panic(err)
		}
		client := ttrpc.NewClient(connection)
		ctx, cancel := context.WithCancel(context.Background())
		if how == "deadline" {
			ctx, cancel = context.WithTimeout(context.Background(), time.Second/2)
		}
		go client.Call(ctx, "test.Service", "Wait", &emptypb.Empty{}, &emptypb.Empty{})
		<-called
		switch how {
		case "cancelled by the client":
			cancel()
		case "connection closed":
			client.Close()
		}
		fmt.Printf("%s: %s\n", how, <-found)
		cancel()
		client.Close()
	}
}
END
export GO111MODULE=off GOFLAGS='' GOTOOLCHAIN=local CGO_ENABLED=0 GOROOT=$PWD/root/usr/lib/go-1.24
export GOPATH=$PWD/gopath:$PWD/root/usr/share/gocode GOCACHE=$PWD/cache HOME=$PWD
"$GOROOT/bin/go" run ask | tee seen
diff seen - <<'END'
deadline: context deadline exceeded
cancelled by the client: runs on for two seconds
connection closed: context canceled
END
