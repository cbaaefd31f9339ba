// Keeps an application out of the way of what happens to its VM: it drains before it says "go ahead".
// Nothing but the base libraries, of .NET as of mono. Its Main runs it on a real VM, here or on Azure.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Net.Http;
using System.Runtime.Serialization;
using System.Runtime.Serialization.Json;
using System.Text;
using System.Threading;

[DataContract]
public class Event
{
    [DataMember] public string EventId { get; set; }
    [DataMember] public string EventStatus { get; set; }
    [DataMember] public string EventType { get; set; }
    [DataMember] public string NotBefore { get; set; }
    [DataMember] public string[] Resources { get; set; }
}

[DataContract]
public class Document
{
    [DataMember(IsRequired = true)] public Event[] Events { get; set; }
}

public class Handler
{
    private const string EventsPath = "/metadata/scheduledevents?api-version=2020-07-01";
    private const string NamePath = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";

    // The endpoint is near, and no proxy knows it.
    private static readonly HttpClient Client =
        new HttpClient(new HttpClientHandler { UseProxy = false }) { Timeout = TimeSpan.FromSeconds(10) };

    private readonly string endpoint;
    private readonly Action drain;
    private readonly Action resume;
    private readonly HashSet<string> approved = new HashSet<string>();
    private string name;
    private bool isDrained;

    /// <summary>The name is asked for if it is not given. It is the one that Resources have, not the hostname.</summary>
    public Handler(string endpoint, Action drain, Action resume, string name = null)
    {
        this.endpoint = endpoint;
        this.drain = drain;
        this.resume = resume;
        this.name = name;
    }

    /// <summary>One look at what is to come, and what follows. After an exception nothing is concluded: the next look may succeed.</summary>
    public void Look()
    {
        name = name ?? Ask(HttpMethod.Get, NamePath);
        // All VMs of an availability set see one document; what counts is whether our name is in it.
        var ours = Json.Read<Document>(Ask(HttpMethod.Get, EventsPath)).Events.Where(one => one.Resources.Contains(name)).ToList();
        if (ours.Count > 0 && !isDrained)
        {
            Console.WriteLine($"{ours[0].EventType} ahead, not before '{ours[0].NotBefore}': draining");
            drain();
            isDrained = true;
        }
        foreach (var scheduled in ours.Where(one => one.EventStatus == "Scheduled"))
        {
            Approve(scheduled);
        }
        if (ours.Count == 0 && isDrained)
        {
            resume();
            isDrained = false;
            approved.Clear();
            Console.WriteLine("it is over: taking work again");
        }
    }

    // Once: an approved event may still have to wait, for its turn or for the word of others.
    private void Approve(Event scheduled)
    {
        if (approved.Contains(scheduled.EventId)) return;
        Ask(HttpMethod.Post, EventsPath, "{\"StartRequests\": [{\"EventId\": \"" + scheduled.EventId + "\"}]}");
        approved.Add(scheduled.EventId);
        Console.WriteLine($"approved {scheduled.EventType} {scheduled.EventId}");
    }

    private string Ask(HttpMethod method, string path, string body = null)
    {
        using (var request = new HttpRequestMessage(method, endpoint + path))
        {
            request.Headers.Add("Metadata", "true");
            request.Content = body == null ? null : new StringContent(body, Encoding.UTF8, "application/json");
            using (var answer = Client.SendAsync(request).GetAwaiter().GetResult())
            {
                return answer.EnsureSuccessStatusCode().Content.ReadAsStringAsync().GetAwaiter().GetResult();
            }
        }
    }

    public static void Main()
    {
        var endpoint = Environment.GetEnvironmentVariable("ENDPOINT")
            ?? Environment.GetEnvironmentVariable("FOREWARN_ENDPOINT") // `forewarn lab run` sets it
            ?? "http://169.254.169.254";
        // A real application closes its doors here, and waits until what it has in hand is done.
        var handler = new Handler(endpoint, drain: () => Thread.Sleep(5000), resume: () => { });
        while (true) // ends when it is stopped
        {
            try
            {
                handler.Look();
            }
            catch (Exception problem) when (
                problem is HttpRequestException || problem is OperationCanceledException || problem is SerializationException)
            {
                Console.WriteLine($"no sense to be had of the endpoint: {problem.Message}");
            }
            Thread.Sleep(1000);
        }
    }
}

public static class Json
{
    private static readonly DataContractJsonSerializerSettings Settings =
        new DataContractJsonSerializerSettings { UseSimpleDictionaryFormat = true };

    public static T Read<T>(string text)
    {
        using (var stream = new MemoryStream(Encoding.UTF8.GetBytes(text)))
        {
            return (T)new DataContractJsonSerializer(typeof(T), Settings).ReadObject(stream);
        }
    }
}
