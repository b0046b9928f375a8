// netdelay: an Ethernet switch in user space that serialises and delays every frame, for kernels
// without netem.
//
//     netdelay DELAY_US RATE_MBIT IF0 IF1 ...      (in the hub's namespace; RATE 0 = delay only)
//
// A frame from IFi to MAC 02:00:00:00:07:<j> is serialised on i's uplink clock, delayed by
// DELAY_US, serialised on j's downlink clock (cut-through, no free burst, tail drop after 100 ms of
// queue) and sent on IFj. Broadcasts flood. PACKET_VNET_HDR keeps large segments whole, one copy in
// and one out; their length on the wire counts a header of 66 bytes for every segment within.
// Prints "ready" once it forwards.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef PACKET_IGNORE_OUTGOING
#define PACKET_IGNORE_OUTGOING 23
#endif
#define PORTS 32
#define QUEUE 8192
#define LARGEST (70 * 1024)
#define VNET 10   // bytes of struct virtio_net_hdr before each frame
#define HEADER 66 // Ethernet 14, IPv4 20, TCP with time stamps 32
#define LONGEST_QUEUE_NS 100000000

typedef struct {
    int64_t due;
    int length;
    unsigned char *bytes;
} Frame;

static Frame queue[PORTS][QUEUE];
static unsigned head[PORTS], tail[PORTS];
static int64_t uplink_free[PORTS], downlink_free[PORTS], delay_ns;
static double ns_per_byte;
static int fd[PORTS], ports;
static volatile sig_atomic_t stop;

static void on_signal(int number) {
    (void)number;
    stop = 1;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void send_frame(int port, Frame *frame) {
    ssize_t sent;
    do sent = send(fd[port], frame->bytes, frame->length, 0);
    while (sent < 0 && errno == EINTR);
    free(frame->bytes);
}

// Send all that is due; return when the next frame is.
static int64_t send_due(void) {
    int64_t next = INT64_MAX, time = now();
    for (int port = 0; port < ports; port++) {
        for (; head[port] != tail[port]; head[port]++) {
            Frame *frame = &queue[port][head[port] % QUEUE];
            if (frame->due > time) {
                if (frame->due < next) next = frame->due;
                break;
            }
            send_frame(port, frame);
        }
    }
    return next;
}

static int64_t wire_length(const unsigned char *bytes, int length) {
    int64_t wire = length - VNET, payload = wire - HEADER;
    uint16_t segment;
    memcpy(&segment, bytes + 4, 2);
    if (bytes[1] && segment && payload > segment) {
        wire += ((payload + segment - 1) / segment - 1) * HEADER;
    }
    return wire;
}

static void enqueue(int port, int64_t arrival, int64_t serialising, const void *bytes, int length) {
    int64_t start = arrival > downlink_free[port] ? arrival : downlink_free[port];
    if (start - arrival > LONGEST_QUEUE_NS || tail[port] - head[port] >= QUEUE) return;
    downlink_free[port] = start + serialising;
    Frame *frame = &queue[port][tail[port]++ % QUEUE];
    *frame = (Frame){downlink_free[port], length, malloc(length)};
    memcpy(frame->bytes, bytes, length);
}

static void route(int from, int64_t time, const unsigned char *bytes, int length) {
    int first = 0, last = ports;
    const unsigned char *to = bytes + VNET;
    if (!(to[0] & 1)) {
        if (to[0] != 2 || to[4] != 7 || to[5] >= ports) return;
        first = to[5];
        last = first + 1;
    }
    int64_t serialising = (int64_t)(wire_length(bytes, length) * ns_per_byte);
    int64_t start = time > uplink_free[from] ? time : uplink_free[from];
    uplink_free[from] = start + serialising;
    for (int port = first; port < last; port++) {
        if (port != from) enqueue(port, start + delay_ns, serialising, bytes, length);
    }
}

static int64_t received_at(struct msghdr *message) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_type == SO_TIMESTAMPNS) {
            struct timespec *t = (void *)CMSG_DATA(c);
            return t->tv_sec * 1000000000LL + t->tv_nsec;
        }
    }
    return now();
}

static void receive(int port) {
    static unsigned char bytes[LARGEST];
    for (int count = 0; count < 64; count++) {
        char control[128];
        struct iovec place = {bytes, LARGEST};
        struct msghdr message = {.msg_iov = &place,
                                 .msg_iovlen = 1,
                                 .msg_control = control,
                                 .msg_controllen = sizeof control};
        ssize_t length = recvmsg(fd[port], &message, MSG_DONTWAIT);
        if (length < VNET + 14) return;
        route(port, received_at(&message), bytes, length);
    }
}

static int open_port(const char *interface) {
    int s = socket(AF_PACKET, SOCK_RAW, 0), one = 1, room = 64 << 20;
    setsockopt(s, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one);
    setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
    setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    setsockopt(s, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
    struct sockaddr_ll address = {.sll_family = AF_PACKET,
                                  .sll_protocol = htons(ETH_P_ALL),
                                  .sll_ifindex = if_nametoindex(interface)};
    if (bind(s, (void *)&address, sizeof address)) {
        perror(interface);
        exit(1);
    }
    return s;
}

static void forward(void) {
    struct pollfd polled[PORTS];
    for (int port = 0; port < ports; port++) {
        polled[port] = (struct pollfd){.fd = fd[port], .events = POLLIN};
    }
    for (int64_t next = INT64_MAX; !stop; next = send_due()) {
        int64_t wait = next - now();
        if (wait < 0) wait = 0;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        int ready = ppoll(polled, ports, next == INT64_MAX ? NULL : &timeout, NULL);
        for (int port = 0; ready > 0 && port < ports; port++) {
            if (polled[port].revents & POLLIN) receive(port);
        }
    }
}

int main(int count, char **arguments) {
    if (count < 4 || count - 3 > PORTS) return 2;
    prctl(PR_SET_PDEATHSIG, SIGTERM); // never outlive the benchmark, however it ends
    delay_ns = atoll(arguments[1]) * 1000;
    ns_per_byte = atof(arguments[2]) > 0 ? 8e3 / atof(arguments[2]) : 0;
    ports = count - 3;
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    struct sched_param priority = {.sched_priority = 10};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("SCHED_FIFO");
    for (int port = 0; port < ports; port++) fd[port] = open_port(arguments[3 + port]);
    puts("ready");
    fflush(stdout);
    forward();
    return 0;
}
