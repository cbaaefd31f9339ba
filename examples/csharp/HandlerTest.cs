// What the handler owes its VM, tested in a lab: events on demand, and a clock that the test moves.
// A program without a test framework; its Test methods can move to xUnit, NUnit or MSTest as they are.
using System;
using System.Collections.Generic;
using System.Net.Http;

public static class HandlerTest
{
    private const string Gone = "{\"fault\": \"status\", \"code\": 410, \"vms\": [\"web-0\"], \"requests\": 1}";

    private static void TestARebootIsApprovedWhenDrainedAndWorkGoesOnWhenItIsOver(Lab lab)
    {
        var id = lab.Maintain("host-a");
        var done = new List<string>();
        var handler = new Handler(lab.Door("web-0"), () => done.Add("drained while " + lab.Event(id)), () => done.Add("resumed"));

        handler.Look();
        Expect("drained while Scheduled", string.Join(", ", done));
        Expect("Started, approved by web-0", lab.Event(id));

        lab.Advance(15 * 60);
        Expect("completed", lab.Event(id));
        handler.Look();
        Expect("drained while Scheduled, resumed", string.Join(", ", done));
    }

    private static void TestWhatBefallsTheNeighbourIsLeftToTheNeighbour(Lab lab)
    {
        var id = lab.Maintain("host-b");
        var done = new List<string>();

        new Handler(lab.Door("web-0"), () => done.Add("drained"), () => done.Add("resumed")).Look();
        Expect("Scheduled", lab.Event(id));
        Expect("", string.Join(", ", done));

        lab.Advance(15 * 60);
        Expect("Started", lab.Event(id));
    }

    private static void TestAnEndpointThatIsGoneIsAskedAgainAndIsNoAllClear(Lab lab)
    {
        var id = lab.Maintain("host-a");
        var done = new List<string>();
        var handler = new Handler(lab.Door("web-0"), () => done.Add("drained"), () => done.Add("resumed"));

        lab.Api("POST", "/faults", Gone);
        ExpectRefusal(handler.Look);
        handler.Look();
        Expect("Started, approved by web-0", lab.Event(id));

        lab.Api("POST", "/faults", Gone);
        ExpectRefusal(handler.Look);
        Expect("drained", string.Join(", ", done));
    }

    private static void Expect(string expected, string got)
    {
        if (got != expected) throw new Exception($"expected '{expected}', got '{got}'");
    }

    private static void ExpectRefusal(Action action)
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
            TestARebootIsApprovedWhenDrainedAndWorkGoesOnWhenItIsOver,
            TestWhatBefallsTheNeighbourIsLeftToTheNeighbour,
            TestAnEndpointThatIsGoneIsAskedAgainAndIsNoAllClear,
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
                catch (Exception problem)
                {
                    failures++;
                    Console.WriteLine($"FAILED {test.Method.Name}: {problem.Message}");
                }
                lab.Advance(3600); // whatever a test began is over
            }
        }
        return failures == 0 ? 0 : 1;
    }
}
