// Tests the handler in a lab: events on demand, and a clock that the test moves.
// A program without a test framework; its Test methods can move to xUnit, NUnit or MSTest as they are.
using System;
using System.Collections.Generic;
using System.Net.Http;

public static class HandlerTest
{
    private const string Gone = "{\"fault\": \"status\", \"code\": 410, \"vms\": [\"web-0\"], \"requests\": 1}";

    private static void TestRebootIsApprovedAfterDrainingAndWorkResumesAfterwards(Lab lab)
    {
        var id = lab.Maintain("host-a");
        var done = new List<string>();
        var handler = new Handler(lab.Endpoint("web-0"), () => done.Add("drained while " + lab.Event(id)), () => done.Add("resumed"));

        handler.Poll();
        Expect("drained while Scheduled", string.Join(", ", done));
        Expect("Started, approved by web-0", lab.Event(id));

        lab.Advance(15 * 60);
        Expect("completed", lab.Event(id));
        handler.Poll();
        Expect("drained while Scheduled, resumed", string.Join(", ", done));
    }

    private static void TestEventsOfAnotherVmAreIgnored(Lab lab)
    {
        var id = lab.Maintain("host-b");
        var done = new List<string>();

        new Handler(lab.Endpoint("web-0"), () => done.Add("drained"), () => done.Add("resumed")).Poll();
        Expect("Scheduled", lab.Event(id));
        Expect("", string.Join(", ", done));

        lab.Advance(15 * 60);
        Expect("Started", lab.Event(id));
    }

    private static void TestFailedPollIsRetriedAndDoesNotEndTheEvent(Lab lab)
    {
        var id = lab.Maintain("host-a");
        var done = new List<string>();
        var handler = new Handler(lab.Endpoint("web-0"), () => done.Add("drained"), () => done.Add("resumed"));

        lab.Api("POST", "/faults", Gone);
        ExpectHttpError(handler.Poll);
        handler.Poll();
        Expect("Started, approved by web-0", lab.Event(id));

        lab.Api("POST", "/faults", Gone);
        ExpectHttpError(handler.Poll);
        Expect("drained", string.Join(", ", done));
    }

    private static void Expect(string expected, string got)
    {
        if (got != expected) throw new Exception($"expected '{expected}', got '{got}'");
    }

    private static void ExpectHttpError(Action action)
    {
        try { action(); }
        catch (HttpRequestException) { return; }
        throw new Exception("a 410 was not noticed");
    }

    public static int Main()
    {
        var failures = 0;
        var tests = new Action<Lab>[]
        {
            TestRebootIsApprovedAfterDrainingAndWorkResumesAfterwards,
            TestEventsOfAnotherVmAreIgnored,
            TestFailedPollIsRetriedAndDoesNotEndTheEvent,
        };
        using (var lab = new Lab())
        {
            foreach (var test in tests)
            {
                try
                {
                    test(lab);
                    Console.WriteLine($"ok     {test.Method.Name}");
                }
                catch (Exception error)
                {
                    failures++;
                    Console.WriteLine($"FAILED {test.Method.Name}: {error.Message}");
                }
                lab.Advance(3600); // end the events of the test
            }
        }
        return failures == 0 ? 0 : 1;
    }
}
