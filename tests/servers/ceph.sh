#!/bin/sh
# Ceph's S3 gateway on 127.0.0.1: one monitor, one OSD in memory. Debian: radosgw, ceph-mon, ceph-osd.
#   sh ceph.sh FOLDER GATEWAY MONITOR     two free ports; keys are "any" and "secret"
# Ends by the pids in FOLDER/run. With `auth * required = none` the gateway needs `ms mon client mode`.
set -e
mkdir -p "$1" && cd "$1" && here=$PWD
mkdir -p mon osd run log rgw
fsid=$(cat /proc/sys/kernel/random/uuid)
cat > ceph.conf <<C
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$3/0
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = $here/run
admin socket = $here/run/\$name.asok
log file = $here/log/\$name.log
pid file = $here/run/\$name.pid
[mon]
mon data = $here/mon
mon data avail warn = 2
mon data avail crit = 1
[osd]
osd data = $here/osd
osd objectstore = memstore
memstore device bytes = 2147483648
[client.rgw]
ms mon client mode = crc
ms client mode = crc
rgw frontends = beast endpoint=127.0.0.1:$2
rgw data = $here/rgw
C
export CEPH_ARGS="-c $here/ceph.conf"
root="--setuser $(id -un) --setgroup $(id -gn)"
monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$3]" monmap --clobber
ceph-mon --mkfs -i a --monmap monmap $root
ceph-mon -i a $root
timeout 60 ceph osd create
ceph-osd -i 0 --mkfs $root
timeout 60 ceph osd crush add osd.0 1 root=default host=h
ceph-osd -i 0 $root
timeout 60 ceph auth get-or-create client.rgw mon 'allow *' osd 'allow *' -o rgw/keyring
radosgw -n client.rgw --keyring "$here/rgw/keyring" $root
timeout 120 radosgw-admin -n client.rgw --keyring "$here/rgw/keyring" user create --uid=try \
  --display-name=try --access-key=any --secret-key=secret > user.json
