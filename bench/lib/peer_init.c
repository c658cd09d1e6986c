/* First process of a guest or container: reads a byte, runs /true, and writes a byte, in a loop. A
   virtual machine uses the first serial port, a container its standard input and output. */
#include <fcntl.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

/* Makes the first serial port the standard input and output, without processing of characters. */
static void ready_serial(void) {
    struct termios raw;
    mount("dev", "/dev", "devtmpfs", 0, "");
    int serial = open("/dev/ttyS0", O_RDWR | O_NOCTTY);
    if (serial < 0 || tcgetattr(serial, &raw))
        _exit(1);
    cfmakeraw(&raw);
    tcsetattr(serial, TCSANOW, &raw);
    dup2(serial, 0);
    dup2(serial, 1);
}

int main(int count, char **words) {
    char byte;
    if (count > 1 && !strcmp(words[1], "exit"))
        return 0;
    if (count > 1 && !strcmp(words[1], "wait"))
        for (;;)
            pause();
    ready_serial();
    if (write(1, "\x01", 1) != 1)
        return 1;
    while (read(0, &byte, 1) == 1) {
        int status = 1;
        pid_t child = fork();
        if (!child) {
            execl("/true", "true", "exit", (char *)0);
            _exit(1);
        }
        waitpid(child, &status, 0);
        byte = status ? '\x03' : '\x02';
        if (write(1, &byte, 1) != 1)
            return 1;
    }
    return 0;
}
