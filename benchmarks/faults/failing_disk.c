/* A disk that fails: from the n-th call on that changes a file below a directory, every such call gives `error`.
 * Loaded by LD_PRELOAD, so that it fails for libraries in any language; it does nothing before `fail_below` is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];
static atomic_long left;
static int error;

void fail_below(const char *directory, long calls, int code) {
    strncpy(below, directory, sizeof below - 1);
    left = calls;
    error = code;
}

static int fails(const char *path) {
    if (!error || strncmp(path, below, strlen(below))) return 0;
    if (atomic_fetch_sub(&left, 1) > 1) return 0;
    errno = error;
    return 1;
}

static int fails_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!error) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fails(path);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) { REAL(write); return fails_fd(fd) ? -1 : real(fd, data, size); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); return fails_fd(fd) ? -1 : real(fd, v, n); }
ssize_t pwrite(int fd, const void *d, size_t n, off_t o) { REAL(pwrite); return fails_fd(fd) ? -1 : real(fd, d, n, o); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t o) {
    REAL(pwrite64);
    return fails_fd(fd) ? -1 : real(fd, d, n, o);
}
int fsync(int fd) { REAL(fsync); return fails_fd(fd) ? -1 : real(fd); }
int rename(const char *from, const char *to) { REAL(rename); return fails(to) ? -1 : real(from, to); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fails(path) ? -1 : real(path, mode); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); return fails_fd(fd) ? -1 : real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return fails_fd(fd) ? -1 : real(fd, size); }
