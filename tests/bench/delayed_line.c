/* A line with latency and a rate between two TUN devices; built and run by bench_links.py.

   usage: delayed_line NAME_A NAME_B DELAY_US BYTES_PER_S QUEUE_BYTES

   Whatever the kernel sends into one device waits for the line, occupies it for its length over the
   rate, travels for the delay, and comes out of the other. What finds the queue before the line
   full is dropped, as a router drops it. Both ways work by themselves. Packets come whole as TCP
   cuts them off (up to 64 KB, IFF_VNET_HDR), so the rate is one of payload, within a thousandth. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 66000, HEADER = 10 };

struct packet {
    struct packet *next;
    double due;
    ssize_t size;
    char bytes[];
};

struct way {
    int in, out;
    double free_at;
    struct packet *first, **last;
};

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static int device(const char *name) {
    struct ifreq wanted = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    strncpy(wanted.ifr_name, name, IFNAMSIZ - 1);
    if (file < 0 || ioctl(file, TUNSETIFF, &wanted) < 0 ||
        ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) {
        perror(name);
        exit(1);
    }
    return file;
}

/* Take in what the kernel sends, up to what one turn should. */
static void take(struct way *way, double delay, double rate, double queue) {
    static char bytes[LARGEST];
    for (int count = 0; count < 64; count++) {
        ssize_t size = read(way->in, bytes, LARGEST);
        if (size <= 0)
            return;
        double at = now();
        if (way->free_at < at)
            way->free_at = at;
        if ((way->free_at - at) * rate > queue)
            continue;
        way->free_at += (size - HEADER) / rate;
        struct packet *packet = malloc(sizeof *packet + size);
        if (!packet)
            exit(1);
        *packet = (struct packet){.due = way->free_at + delay, .size = size};
        memcpy(packet->bytes, bytes, size);
        *way->last = packet;
        way->last = &packet->next;
    }
}

/* Deliver what is due; returns when the next packet is, or a second from now. */
static double give(struct way *way) {
    double at = now();
    while (way->first && way->first->due <= at) {
        struct packet *packet = way->first;
        /* EIO: the device is not up yet, and its first announcements may be lost. */
        if (write(way->out, packet->bytes, packet->size) < 0 && errno != EIO)
            perror("write");
        way->first = packet->next;
        if (!way->first)
            way->last = &way->first;
        free(packet);
    }
    return way->first ? way->first->due : at + 1;
}

int main(int count, char **told) {
    if (count != 6)
        return 2;
    double delay = atof(told[3]) * 1e-6, rate = atof(told[4]), queue = atof(told[5]);
    int a = device(told[1]), b = device(told[2]);
    struct way ways[2] = {{.in = a, .out = b}, {.in = b, .out = a}};
    for (int way = 0; way < 2; way++)
        ways[way].last = &ways[way].first;
    puts("ready");
    fflush(stdout);
    for (;;) {
        double due = give(&ways[0]), other = give(&ways[1]);
        if (other < due)
            due = other;
        double left = due - now();
        struct timespec wait = {.tv_nsec = left > 0 ? (long)(left * 1e9) % 1000000000L : 0};
        struct pollfd files[2] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
        ppoll(files, 2, &wait, NULL);
        for (int way = 0; way < 2; way++)
            take(&ways[way], delay, rate, queue);
    }
}
